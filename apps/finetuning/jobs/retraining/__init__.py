"""Plans that repeat a job on a schedule or when a dataset grows, and promote a model only if it beats production."""
