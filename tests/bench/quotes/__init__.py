"""How fast quotes are: of the view that shows them, and of one core."""
