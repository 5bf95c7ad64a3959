"""The steps of the wizard: the page context of each, and their order."""
