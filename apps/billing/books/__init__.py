"""The books kept honest: reconciliation, daily seals, and adjustments with two operators."""
