"""Money for each request: spending slices, tickets, the recorder and its spool."""
