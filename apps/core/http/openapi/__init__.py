"""The OpenAPI document: one description of every call, made from the types that serve it."""
