"""Reading and writing one registry: the marker, HEAD, records, pointers, quotas."""
