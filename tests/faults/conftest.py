"""Faults on real processes and, where an engine is part of it, a real engine of the test's own."""

from __future__ import annotations

import sys

import pytest

from tests.faults.project import Project, lay_out


@pytest.fixture(scope="session")
def project(tmp_path_factory: pytest.TempPathFactory) -> Project:
    """Cells run in the interpreter of these tests."""
    root = tmp_path_factory.mktemp("faults")
    lay_out(root)
    return Project(root, ("--runtime", "host", "--python", sys.executable))
