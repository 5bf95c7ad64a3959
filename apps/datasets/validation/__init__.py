"""From bytes to checked rows: containers, formats, row checks, repairs and Parquet."""
