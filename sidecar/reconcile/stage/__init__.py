"""Copies on the pod's disk, which the engine reads instead of the volume."""
