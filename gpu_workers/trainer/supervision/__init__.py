"""The supervision of one attempt on this machine, which is its first or one of its other machines."""
