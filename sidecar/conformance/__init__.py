"""The conformance suite: what two mounts of one filesystem keep of what the registry stands on.

Promise: every probe runs the registry's own primitives in real processes, one for each mount; it
ends in a bounded time, also on a filesystem that hangs; it writes in one scratch folder of its own
and removes it; it opens nothing else on the volume. It judges a filesystem, not a registry: there
need not be one.
"""

from lora_fs.sidecar.conformance.report import Delay, Promise, Rates, Verdict
from lora_fs.sidecar.conformance.suite import FULL, QUICK, Effort, examine

__all__ = ["FULL", "QUICK", "Delay", "Effort", "Promise", "Rates", "Verdict", "examine"]
