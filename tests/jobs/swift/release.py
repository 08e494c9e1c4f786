"""What ms-swift 4 does otherwise: it moved modules, renamed a flag and gave its GRPO loss other arguments."""

from __future__ import annotations

import importlib.metadata

from packaging.version import Version


def installed() -> Version:
    """The release that is installed here."""
    return Version(importlib.metadata.version("ms-swift"))


def four(release: Version) -> bool:
    """Whether it is release 4 or newer."""
    return release >= Version("4")


def tuner_flag(release: Version) -> str:
    """The flag that says what is trained: lora or full."""
    return "tuner_type" if four(release) else "train_type"
