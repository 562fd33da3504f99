"""The differences between vLLM's minors, and what the plugin relies on in each.

``surface`` is one table of functions, their parameters, attributes; ``probes`` tries what vLLM does;
``layers`` knows its kinds of LoRA layers; ``differences`` is the only place that asks which way a vLLM
does something. Nothing here reads a version's number.
"""
