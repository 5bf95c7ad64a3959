"""The ways in: web, public API, worker API, gateway, operator console and command line."""
