"""Anneal's own API under /api/v1."""
