"""The sidecar's HTTP API and its streaming proxy. No route touches a disk."""
