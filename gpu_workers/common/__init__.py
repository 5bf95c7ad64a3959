"""Code that all worker processes share: configuration, the control plane's client, files, processes."""
