"""Files of requests that are answered within a day, behind all live requests: OpenAI's Batch API."""
