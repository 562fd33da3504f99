"""The root of everything that the demo and the tests call a failure; Ctrl-C is not one.

DemoFailed
├── CheckFailed      a step did not show what it promised
├── AnswersDiffer    two replicas answered the same request unlike
├── CommandFailed    a ``lora-fs`` command that had to succeed did not
├── NeverHappened    what was waited for did not come true in time
└── ProcessFailed    an engine or a sidecar ended, or was not ready in time
"""

from __future__ import annotations


class DemoFailed(Exception):
    """Something did not hold; ``str()`` says what, and what was seen instead."""
