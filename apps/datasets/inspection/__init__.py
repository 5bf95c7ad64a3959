"""What a person should look at before training: findings, personal data, comparisons of files."""
