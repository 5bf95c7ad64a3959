"""vLLM as one thing that can be started, asked and killed."""
