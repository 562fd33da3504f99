"""The step's arithmetic: vLLM's punica wrappers with ``kernels`` under them."""
