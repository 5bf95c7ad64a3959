"""The control plane in virtual time: real database, real operations, and machines whose faults follow from a seed."""
