"""Secrets that must be read back, sealed under keys derived from SECRET_KEY."""
