"""Service accounts and projects: parts of an organization that programs work in."""
