"""Effects after a commit: the outbox, live updates and the invalidation of cached keys."""
