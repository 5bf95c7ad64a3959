"""The content of requests: fields, media, tools, JSON schemas and grammars."""
