"""The base model of an adapter: which one it names, and which modules and sizes it has."""
