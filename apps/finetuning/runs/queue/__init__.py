"""Waiting runs of a pool: their order, and the shares of those who wait."""
