"""Monthly statements, their files and the billing profile they are addressed to."""
