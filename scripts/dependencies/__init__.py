"""Locked dependencies: creation of the locks, and their audit."""
