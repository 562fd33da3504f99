"""Lists of adapters that other systems keep, read so that they can be registered here."""
