"""What goes on to the engine: the adapter is held, the name rewritten, bytes streamed."""
