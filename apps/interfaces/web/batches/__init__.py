"""Pages of batches and of stored completions."""
