"""The routes that this process answers itself, one module a family."""
