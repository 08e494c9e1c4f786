"""What the ranks of these tests are given: the backend of the CPU, and where asked more of an environment."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from tests.jobs.launcher import Launcher, Outcome

CPU: dict[str, Any] = {
    "id": "cpu",
    "accelerator": "cpu",
    "communication": "gloo",
    "start_method": "forkserver",
    "shims": [
        *("communication-first", "float-tensor-of-a-number", "fp16-on-cpu", "gather-one-by-one"),
        *("gather-without-autograd", "memory-of-the-cpu", "no-shared-memory-collective", "wait-for-every-gather"),
    ],
    "training_arguments": {"use_cpu": True},
    "environment": {},
    "versions": [],
    "visible": None,
    "devices": [],
}
"""As matrix.yaml has it and `ci.order` writes it (tests/unit compares them); a stack has nothing to read YAML with."""


class Given(Launcher):
    """A launcher whose ranks have more in their environment."""

    def __init__(self, environment: Mapping[str, str]) -> None:
        super().__init__()
        self._more = environment

    def run(self, *arguments: Any, **options: Any) -> Outcome:
        return super().run(*arguments, **{**options, "environment": self._more})
