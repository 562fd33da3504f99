"""Options that commands share: their parsing, the setting behind each, ``--wait``."""
