"""The command `images`: what it refuses before it asks an engine."""

from __future__ import annotations

from pathlib import Path

import pytest

from ci.commands import images
from ci.errors import UsageError
from ci.provision.carry import fingerprint


def test_one_way_at_a_time() -> None:
    with pytest.raises(UsageError, match="found --push and --save; expected one of them"):
        images.main(push="127.0.0.1:5000/zero", save=Path("x.tar"))


def test_only_what_decides_a_run_is_compared() -> None:
    files = {"matrix.yaml": b"a", "docker/locks/x.txt": b"b", "tests/jobs/a.py": b"c"}
    assert fingerprint(files) == fingerprint({**files, "README.md": b"d", "tests/unit/a.py": b"e"})
    for name in files:
        assert fingerprint(files) != fingerprint({**files, name: b"other"})
