"""The serving agent: keeps on one engine the adapters that the control plane requests."""
