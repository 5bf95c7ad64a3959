"""The processes that a trainer starts: how they begin, what they give up, and how they end."""
