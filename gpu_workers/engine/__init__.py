"""vLLM as one unit that can be started, queried and killed."""
