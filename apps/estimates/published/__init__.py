"""Published measurements: how they are read, predicted and used as speed sources."""
