"""Elastic pools on a real Slurm whose nodes die: `make bench-capacity`."""
