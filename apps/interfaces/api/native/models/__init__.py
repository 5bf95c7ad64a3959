"""Base models and adapters by name: their files, limits and licences."""
