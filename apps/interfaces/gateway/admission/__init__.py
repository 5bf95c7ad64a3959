"""Whose request this is and whether it may run now: keys and limits."""
