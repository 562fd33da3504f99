"""``oci://registry/repository:tag``: an artifact of an OCI registry, by the Distribution API."""
