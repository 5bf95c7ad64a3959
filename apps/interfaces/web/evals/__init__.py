"""Pages of evals and their runs."""
