"""Chat completions that are kept because their request said `store: true`."""
