"""What a training log says, as frozen records; the same whatever format it was written in."""

from __future__ import annotations

from typing import NamedTuple


class Step(NamedTuple):
    """One training record. number: its optimizer step, from 1, where the log has it; None: the log has no such value.

    A tuple and no dataclass: a log of a gigabyte has millions of them.
    """

    number: int | None
    loss: float | None
    grad_norm: float | None


class Scale(NamedTuple):
    """DeepSpeed told of its loss scale. overflow: the step was skipped; None: not told."""

    before: float | None
    after: float | None
    overflow: bool


class Release(NamedTuple):
    """A package, by its canonical name, and the version that the log names."""

    package: str
    version: str


class Setting(NamedTuple):
    """A setting of the run, by the name of its case key: zero_stage, dtype, gradient_clipping."""

    key: str
    value: int | float | str


class Raised(NamedTuple):
    """The message of an exception."""

    message: str


class Unread(NamedTuple):
    """Something that should have been a training record and cannot be read, such as a last line cut short."""


Record = Step | Scale | Release | Setting | Raised | Unread
