"""The customer's side: connections, bodies and answers."""
