"""The customers' side: connections, bodies and answers."""
