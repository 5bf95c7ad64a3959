"""PostgreSQL as the foundation: tenancy, policies, guarded transitions, locks and the one clock."""
