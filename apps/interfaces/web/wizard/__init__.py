"""The new fine-tune wizard: method, compute, review and launch."""
