"""Rows as token ids: encoding, selection and packing."""
