"""Commands that register adapters, change them, and say which revision a name serves."""
