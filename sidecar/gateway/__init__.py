"""One address for a fleet: which replica answers a request, and the process that passes it on."""
