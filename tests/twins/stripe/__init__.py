"""Stripe, as far as this project talks to it: a contract read from its package, and a stateful twin with faults."""
