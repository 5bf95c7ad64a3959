"""What a trainer does while it has no run: rehearsals, examinations, conversions and measurements."""
