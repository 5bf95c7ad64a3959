"""What was used and what it costs: metered requests, spending slices, stored bytes."""
