"""Measurements on which estimates are based."""
