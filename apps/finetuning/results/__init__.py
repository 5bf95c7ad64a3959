"""Results of a run: checkpoints, models, cards, result files and certificates."""
