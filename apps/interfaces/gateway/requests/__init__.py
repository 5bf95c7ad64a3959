"""What a request may contain: fields, media, tools, JSON schemas and grammars."""
