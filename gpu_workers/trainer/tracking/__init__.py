"""Reports to customers' experiment trackers, sent by a separate process."""
