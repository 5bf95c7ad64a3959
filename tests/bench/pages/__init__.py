"""The time of pages and lists over large tables: `make bench-pages`."""
