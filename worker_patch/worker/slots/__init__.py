"""The adapters in memory, on the device and in slots, and the parts of a slot."""
