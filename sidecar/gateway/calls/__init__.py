"""Parts of calls that concern every replica: asking them all, pauses, and comparing configurations."""
