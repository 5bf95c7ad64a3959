"""The endpoints: chat, completions, responses and embeddings."""
