"""What a run leaves: checkpoints, models, cards, result files and certificates."""
