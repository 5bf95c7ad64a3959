"""The processes that a trainer starts: their start, their confinement, and their end."""
