"""What a trainer does while it has no run: rehearsals of memory, examinations of adapters, and measurements."""
