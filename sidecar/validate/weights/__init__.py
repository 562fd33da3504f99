"""Rules for the weights file: its header, the tensors it lists, the numbers it holds."""
