"""What organizations use and may use: GPU time, its charges, quotas and storage."""
