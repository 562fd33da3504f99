"""From an adapter's files to one packed block in host memory, checked, beside the steps."""
