"""The gateway beside the gateways people would use instead: one static engine, one load generator, one process each."""
