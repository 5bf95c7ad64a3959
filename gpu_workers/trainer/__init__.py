"""The trainer: claims a run, prepares it, supervises its child and reports."""
