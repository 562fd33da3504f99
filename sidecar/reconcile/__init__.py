"""Makes one replica's engine load the desired adapters."""
