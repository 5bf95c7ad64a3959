"""The parts that all pages share: access, navigation, frame, theme, search, live updates, downloads."""
