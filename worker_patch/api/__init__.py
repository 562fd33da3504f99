"""In the API server: the registry's names in vLLM's routes, and a gate before every request."""
