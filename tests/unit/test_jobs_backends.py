"""The jobs run unchanged on every backend: what differs between them comes from the backend's entry alone."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from ci import order
from ci.matrix import load
from ci.plan import PlannedStack
from tests.stack.given import CPU

ROOT = Path(__file__).parents[2]
JOBS = ROOT / "tests" / "jobs"
MATRIX = load(ROOT / "matrix.yaml")
WORDS = frozenset(
    word for entry in MATRIX.backends.values() for word in (entry.accelerator, entry.communication)
) | frozenset(MATRIX.backends)
"""cpu, cuda and npu with their collective libraries."""
ALLOWED = {
    "benchmark_distributed.py: requires_cuda_env": "an attribute of DeepSpeed's own DistributedTest",
    "sweep_engine.py: zero_cpu_offload": "a method of DeepSpeed's engine: is the optimizer in the host's memory",
    "sweep_workload.py: 'cpu'": "DeepSpeed's word for the memory of the host, not an accelerator",
}


def named(tree: ast.AST) -> Iterator[tuple[int, str]]:
    """(line, text) of what names a backend.

    A string that is nothing but such a word, or a device with its number ("cuda:0"); a word in the name of anything
    (`torch.cuda`, `use_cpu`). Prose and the names of shims are none, and `tensor.cpu()` copies to the host, everywhere.
    """
    to_host = {
        id(node.func)
        for node in ast.walk(tree)
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and not (node.args or node.keywords)
    }
    for node in ast.walk(tree):
        line = getattr(node, "lineno", 0)
        if isinstance(node, ast.Constant) and isinstance(node.value, str):
            if re.sub(r":\d*$", "", node.value) in WORDS:
                yield line, repr(node.value)
            continue
        names = {
            ast.Name: ("id",),
            ast.arg: ("arg",),
            ast.keyword: ("arg",),
            ast.Attribute: ("attr",),
            ast.alias: ("name", "asname"),
            ast.ImportFrom: ("module",),
            ast.FunctionDef: ("name",),
        }.get(type(node), ())
        for name in (getattr(node, field) or "" for field in names):
            if id(node) in to_host and name == "cpu":
                continue
            if WORDS & set(re.split(r"[._]", name)):
                yield line, name


@pytest.mark.parametrize(
    ("source", "found"),
    [
        ("if accelerator == 'cuda': pass", "'cuda'"),
        ("x = torch.zeros(1, device=f'npu:{rank}')", "'npu:'"),
        ("x = torch.device('cuda:0')", "'cuda:0'"),
        ("torch.cuda.synchronize()", "cuda"),
        ("x.npu()", "npu"),
        ("x = x.cpu(memory_format=y)", "cpu"),
        ("import torch_npu", "torch_npu"),
        ("from torch.cuda import nccl", "torch.cuda"),
        ("train(use_cpu=True)", "use_cpu"),
        ("init(backend='hccl')", "'hccl'"),
        ("y = x.detach().cpu()", None),
        ("'gloo carries every collective'", None),
        ("shim = 'fp16-on-cpu'", None),
        ("import cpuinfo", None),
    ],
)
def test_what_counts_as_naming_a_backend(source: str, found: str | None) -> None:
    assert [text for _, text in named(ast.parse(source))][:1] == ([] if found is None else [found])


def test_nothing_in_the_jobs_names_a_backend() -> None:
    seen = set()
    for path in sorted(JOBS.rglob("*.py")):
        for line, text in named(ast.parse(path.read_text(encoding="utf-8"))):
            place = f"{path.relative_to(JOBS)}: {text}"
            seen.add(place)
            assert place in ALLOWED, f"tests/jobs/{path.relative_to(JOBS)}:{line} names {text}; ask the backend's entry"
    assert seen == set(ALLOWED), "an exception that is no longer needed"


def test_a_shim_of_an_entry_is_one_of_the_jobs() -> None:
    strings = {
        node.value
        for node in ast.walk(ast.parse((JOBS / "shims.py").read_text(encoding="utf-8")))
        if isinstance(node, ast.Constant) and isinstance(node.value, str)
    }
    for name, entry in MATRIX.backends.items():
        assert set(entry.shims) <= strings, name


def test_the_stacks_tests_have_the_shipped_backend() -> None:
    stack = PlannedStack("newest", {}, None, check_pins=False)
    assert order.build("cpu", MATRIX.backends["cpu"], stack, [])["backend"] == CPU
