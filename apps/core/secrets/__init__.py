"""Recoverable secrets, sealed under keys derived from SECRET_KEY."""
