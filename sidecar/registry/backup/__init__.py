"""Exports, imports and restores."""
