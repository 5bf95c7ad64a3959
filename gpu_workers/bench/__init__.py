"""Measurements that estimates start from."""
