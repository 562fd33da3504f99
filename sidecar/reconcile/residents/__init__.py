"""What the engine holds: loads and unloads, their delays, and room for them."""
