"""Adapters as documents declare them: read the documents, compare them with the registry, carry them out."""
