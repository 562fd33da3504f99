"""Where adapters come from. Today a local folder; hubs and buckets stand behind the same call."""
