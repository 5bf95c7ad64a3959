"""Where replicas may be, and which servers a customer may name for us to call."""
