"""Locked dependencies: making the locks, and auditing them."""
