"""Dataset pages: list, uploads, columns, rows as a model sees them, prices."""
