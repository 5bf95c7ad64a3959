"""Metering of each request: spending slices, tickets, the recorder and its spool."""
