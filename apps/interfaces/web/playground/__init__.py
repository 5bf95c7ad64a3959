"""The playground: conversations with up to four models, and rows made of them."""
