"""Where a command finds its registry: on a volume that is mounted here, or behind a server."""
