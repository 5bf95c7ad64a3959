"""Admission: which key a request belongs to, and whether its limits let it run now."""
