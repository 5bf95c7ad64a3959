"""Completion of a customer's choices to a recipe, its limits and its start point."""
