"""The dashboard: adapters × replicas in a browser, from what this replica knows and what all report."""
