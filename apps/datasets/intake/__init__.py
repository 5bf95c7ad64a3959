"""Incoming files: uploads, versions, lanes, and orphaned objects."""
