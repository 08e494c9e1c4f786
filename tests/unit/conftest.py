"""Settings of the unit tests. No test here has a time limit: a busy machine is not a defect."""

from __future__ import annotations

import os

import pytest
from hypothesis import HealthCheck, settings

settings.register_profile("unit", deadline=None, max_examples=50, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("unit")


def pytest_configure(config: pytest.Config) -> None:
    """A folder of wheels meant for real stacks must not take the place of those that a test makes."""
    os.environ.pop("UV_FIND_LINKS", None)
