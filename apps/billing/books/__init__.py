"""Checks on the books: reconciliation, daily seals, and adjustments approved by two operators."""
