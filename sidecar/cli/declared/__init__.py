"""Adapters as documents say them: read, compared with what is registered, and carried out."""
