"""What a person keeps of the playground: conversations, and presets of settings."""
