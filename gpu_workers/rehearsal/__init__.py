"""Memory rehearsal: the trainer's own code, traced with tensors that have a shape and no memory."""
