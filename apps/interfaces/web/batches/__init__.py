"""Adapter pages: detail, lineage, traffic and serving."""
