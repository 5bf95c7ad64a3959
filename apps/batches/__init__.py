"""Answers of the gateway that outlast their request: files of requests that are answered within a day, behind all live
requests (OpenAI's Batch API), and stored completions.
"""
