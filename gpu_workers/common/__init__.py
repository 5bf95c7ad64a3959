"""What every worker process shares: configuration, the control plane's client, files, processes."""
