"""tests/jobs itself, tested with the real torch and DeepSpeed of a stack."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest

from tests.jobs.conftest import ENVIRONMENT
from tests.jobs.launcher import Launcher


def pytest_configure(config: pytest.Config) -> None:
    os.environ.update(ENVIRONMENT)
    os.environ["DS_ACCELERATOR"] = "cpu"


@pytest.fixture(scope="session")
def launcher() -> Iterator[Launcher]:
    """One warm rank server for the session."""
    yield Launcher()
