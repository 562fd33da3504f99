"""``lora-fs``: the command line. It wires the parts and decides nothing itself.

Exit codes: 0 done, 1 failed, 2 usage, 3 not found, 4 conflict, 5 invalid adapter;
6 timed out waiting, 7 over quota, 8 apply --dry-run differs, 130 interrupted.
"""

try:
    from lora_fs.sidecar.cli.main import main
except KeyboardInterrupt:  # Ctrl-C during imports, which take most of a short command
    raise SystemExit(130) from None

__all__ = ["main"]
