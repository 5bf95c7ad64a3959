"""Memory, time and cost of a fine-tuning job before it runs.

This is pure arithmetic: no Django, no torch, no I/O except seeds.
"""
