"""docs/evidence/gpu.py: what it carries to a machine with a GPU. (What it does there, it was tried with on a CPU.)"""

from __future__ import annotations

import importlib.util
from pathlib import Path
from types import ModuleType

ROOT = Path(__file__).parents[2]


def script() -> ModuleType:
    spec = importlib.util.spec_from_file_location("gpu", ROOT / "docs" / "evidence" / "gpu.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_it_carries_the_jobs_and_the_program_and_leaves_the_machines_torch_alone() -> None:
    entries = script().entries()
    assert {"deepspeed", "transformers", "peft", "pytest", "typer", "pydantic", "ruamel-yaml"} <= entries.keys()
    assert not [name for name in entries if name.startswith(("torch", "nvidia", "triton", "cuda"))]
    # Every package by a hash, so that what runs there is what the locks say.
    assert [name for name, entry in entries.items() if "--hash=sha256:" not in entry] == []
    assert all(entry.count("==") >= 1 and "\n#" not in entry for entry in entries.values())
