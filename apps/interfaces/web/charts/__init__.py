"""Geometry of the static charts."""
