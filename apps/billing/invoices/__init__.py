"""Monthly statements, their files and the profile that they are addressed to."""
