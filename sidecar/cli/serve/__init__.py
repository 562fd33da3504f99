"""Commands that run until they are stopped, and the one that installs the plugin."""
