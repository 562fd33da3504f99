"""Options that commands share: how they are parsed, which setting each stands for, ``--wait``."""
