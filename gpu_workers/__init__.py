"""What runs on a GPU machine: trainer and serving agents. They reach the control plane through /internal/v1 alone."""
