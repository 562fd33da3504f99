"""In the engine's worker: a host tier and slots, filled by a thread, never by the step."""
