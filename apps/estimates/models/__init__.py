"""Shapes of decoder models: families, architectures and parameter counts."""
