"""Folders copied into the tree: adopted when whole, unregistered when taken away."""
