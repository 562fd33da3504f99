"""What happens to an adapter: register, promote, amend, unregister, fetch."""
