"""PostgreSQL foundation: tenancy, policies, guarded transitions, locks and the clock."""
