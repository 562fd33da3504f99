"""The engine as the reconciler sees it, and its HTTP client."""
