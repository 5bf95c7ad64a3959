"""What every page shares: access, navigation, frame, theme, search, live updates, downloads."""
