"""Whether a loaded adapter changes anything: asked in the background, and never of a request's cost."""
