"""The parts after training: comparison, certificate probe, merge, GGUF and publication."""
