"""Our training beside plain TRL and other trainers: same model, rows, batch and steps."""
