"""The object store: a directory or S3, reached by signed URLs."""
