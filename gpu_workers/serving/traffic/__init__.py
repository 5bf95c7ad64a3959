"""Customers' requests to the engine: their entry, their turns, and counts of what the engine made of them."""
