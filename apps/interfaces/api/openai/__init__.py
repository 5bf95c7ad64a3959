"""OpenAI's surface under /v1."""
