"""Job pages: list, live charts, outcome, recipe and evaluation."""
