"""Customers' requests to the engine: their entry, their turns, and the counts of their tokens and bad numbers."""
