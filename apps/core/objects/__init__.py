"""The object store: a directory or S3, accessed through signed URLs."""
