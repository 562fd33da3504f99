"""Reads other systems' lists of adapters, so that they can be registered here."""
