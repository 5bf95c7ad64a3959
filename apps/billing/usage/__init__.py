"""Usage and its cost: metered requests, spending slices, stored bytes."""
