"""What an evaluation of a revision found: a file beside its record. A newer one takes its place."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import FailFast, Field

from lora_fs.sidecar.model.names import Digest, Segment
from lora_fs.sidecar.model.stored import Stored


class Measured(Stored):
    """One revision's answers to all cases.

    Attributes:
        revision: Which one.
        digest: Of its bytes.
        figures: What gates may name of one revision; an unknown figure is absent.
    """

    revision: Segment
    digest: Digest
    figures: dict[str, float]


class Flip(Stored):
    """A case that one of the two revisions passed, and the other did not.

    Attributes:
        line: Of the data file.
        id: As the data file has it, or empty.
        regression: Whether the evaluated revision is the one that did not.
    """

    line: int = Field(ge=1)
    id: str = ""
    regression: bool


class Evaluation(Stored):
    """``<namespace>/<model>/.evaluations/<revision>/<name>.json``: the newest evaluation of a revision.

    Attributes:
        apiVersion: Another one than this is not read.
        kind: What this file is.
        namespace: As the folder it lies in.
        model: As the folder it lies in.
        name: As the file's name begins.
        data: The data file's name, for people.
        data_sha256: Of the data file.
        cases: How many the data file has.
        concurrency: How many answers were under way at a time, of both revisions together.
        measured: The evaluated revision.
        baseline: The revision to compare with; null: none.
        compared: What gates may name of both together; empty without a baseline.
        flips: Cases that one revision passed and the other did not: the first 100.
        gate: The gate that it was held to; null: none.
        passed: Whether it passed its gate; null without one.
        unmet: Why it did not, a sentence for each condition.
        writer: For people.
        updated_at: RFC 3339: when it ended.
    """

    apiVersion: Literal["lora-fs/v1"] = "lora-fs/v1"
    kind: Literal["Evaluation"] = "Evaluation"
    namespace: Segment
    model: Segment
    name: Segment
    data: str = Field(max_length=1_000)
    data_sha256: Annotated[str, Field(pattern=r"^[0-9a-f]{64}$")]
    cases: int = Field(ge=1)
    concurrency: int = Field(ge=1)
    measured: Measured
    baseline: Measured | None = None
    compared: dict[str, float] = Field(default={})
    flips: Annotated[tuple[Flip, ...], FailFast()] = Field(default=(), max_length=100)
    gate: str | None = None
    passed: bool | None = None
    unmet: Annotated[tuple[str, ...], FailFast()] = ()
    writer: str = ""
    updated_at: str = ""
    sum: str = ""

    @property
    def figures(self) -> dict[str, float]:
        """All figures that a gate may name."""
        return {**self.measured.figures, **self.compared}

    @property
    def baseline_figures(self) -> dict[str, float]:
        """What ``baseline`` stands for in a gate."""
        return self.baseline.figures if self.baseline is not None else {}
