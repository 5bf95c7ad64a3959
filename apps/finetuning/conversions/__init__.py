"""Conversions: another form of a finished model, ordered at a price and made by an idle trainer."""
