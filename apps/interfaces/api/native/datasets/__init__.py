"""Calls on datasets, their versions and rows."""
