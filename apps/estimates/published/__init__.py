"""Published measurements: reading, prediction and use as speed sources."""
