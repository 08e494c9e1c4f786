"""A launcher whose ranks are given more of an environment than those of a run."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from tests.jobs.launcher import Launcher, Outcome


class Given(Launcher):
    """A launcher whose ranks have more in their environment."""

    def __init__(self, environment: Mapping[str, str]) -> None:
        super().__init__()
        self._more = environment

    def run(self, *arguments: Any, **options: Any) -> Outcome:
        return super().run(*arguments, **{**options, "environment": self._more})
