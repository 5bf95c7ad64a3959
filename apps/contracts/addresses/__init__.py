"""Allowed addresses: of replicas, and of servers that a customer names for us to call."""
