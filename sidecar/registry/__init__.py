"""The registry on the volume: the format, its protocols, and nothing that knows an engine."""
