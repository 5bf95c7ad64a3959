"""Measurements: the figures that estimates start from."""
