"""Receive what a source offers: ranges resumed, hashed as they arrive, unpacked into one folder."""
