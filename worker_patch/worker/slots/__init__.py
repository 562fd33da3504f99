"""Who is in memory, on the device and in a slot, and what a slot is made of."""
