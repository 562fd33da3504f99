"""Checking and cleaning a registry: fsck, repair, gc."""
