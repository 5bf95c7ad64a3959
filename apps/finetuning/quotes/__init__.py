"""What a job would need, take and cost on each pool."""
