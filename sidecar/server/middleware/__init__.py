"""Layers around the routes: each decides one thing of a request before its route does."""
