"""The training loop: trainers of each objective, callbacks, checkpoints and rehearsal."""
