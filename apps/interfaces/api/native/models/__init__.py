"""Base models and adapters by name: their files, conversions, limits and licences."""
