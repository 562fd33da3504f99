"""The operations for CPUs: loops of our own for a few rows, torch's products for many."""
