"""Moving from other services: rows, recipes and models translated, and what was moved remembered."""
