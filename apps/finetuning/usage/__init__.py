"""An organization's usage and limits: GPU time, its charges, quotas and storage."""
