"""Where adapters come from: a folder of this machine, or what a remote source offers, behind one call."""
