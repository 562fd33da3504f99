"""The base model an adapter was trained on: which one it names, and which modules and sizes it has."""
