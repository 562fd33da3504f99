"""How things lie on the volume: names, sealed JSON, ids. Pure: no I/O."""
