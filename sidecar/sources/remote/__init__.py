"""Sources that are reached over a network: web servers, hubs, buckets, registries, a downloader of yours."""
