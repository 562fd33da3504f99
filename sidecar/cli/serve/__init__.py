"""Commands that run until a signal ends them, and the one that installs the plugin."""
