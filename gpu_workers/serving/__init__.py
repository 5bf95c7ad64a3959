"""The serving agent: keeps one engine holding the adapters that the control plane wants."""
