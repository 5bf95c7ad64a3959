"""Batches of requests (OpenAI's Batch API), and stored completions.

A batch is answered within a day, behind all live requests.
"""
