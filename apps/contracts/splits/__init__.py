"""Training and validation rows: the automatic split, and the rows that repeat a row of the other side."""
