"""The model: loading, attention, shards, weights and the machine it runs on."""
