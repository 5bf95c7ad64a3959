"""Quotes: the memory, time and cost of a job on each pool."""
