"""Memory, time and cost of a fine-tuning job before it runs: pure arithmetic, no Django, no torch, no I/O but seeds."""
