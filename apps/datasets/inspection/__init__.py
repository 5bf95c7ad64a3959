"""Reports for review before training: findings, personal data, comparisons of files."""
