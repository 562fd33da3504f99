"""Threads that watch the volume and other stores."""
