"""The processes of a GPU machine: trainer and serving agents. They use the control plane's /internal/v1 only."""
