"""Writes that clients ask a replica for: register, upload, fetch, unregister."""
