"""The intake of training data beside `datasets`."""
