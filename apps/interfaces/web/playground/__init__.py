"""The playground: conversations with up to four models, and dataset rows made from them."""
