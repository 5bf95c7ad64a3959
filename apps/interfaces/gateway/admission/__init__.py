"""Admission: find the key of a request, and check that its limits let it run now."""
