"""The work of a trainer while it has no run: rehearsals, examinations, conversions and measurements."""
