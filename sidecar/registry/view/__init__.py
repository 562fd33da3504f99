"""The desired state in memory, kept current from HEAD and scans."""
