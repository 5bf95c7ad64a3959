"""Customers' experiment trackers, told by a process of their own."""
