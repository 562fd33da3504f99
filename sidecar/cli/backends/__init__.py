"""Where a command finds its registry: on a volume mounted here, or behind a server."""
