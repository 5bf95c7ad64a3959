"""After training: comparison, certificate probe, merge, GGUF and publication."""
