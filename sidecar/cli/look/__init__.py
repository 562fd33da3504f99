"""Commands that show the registered adapters and each replica's state. They change nothing."""
