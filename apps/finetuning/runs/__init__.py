"""Runs on workers: queue order, leases, reports, attempts and stalls."""
