"""Base models and adapters: their files, conversions, limits, licences and retraining."""
