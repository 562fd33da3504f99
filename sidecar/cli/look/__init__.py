"""Commands that show what is registered and what every replica makes of it. They change nothing."""
