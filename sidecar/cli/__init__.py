"""``lora-fs``: the command line. It wires the parts and decides nothing itself.

Exit codes: 0 done, 1 failed, 2 usage, 3 not found, 4 conflict, 5 invalid adapter,
6 timed out waiting.
"""

from lora_fs.sidecar.cli.main import main

__all__ = ["main"]
