"""From what a customer chose to a complete recipe, its limits and its start point."""
