"""Formats of dates and figures by language, where they differ from those of Django."""
