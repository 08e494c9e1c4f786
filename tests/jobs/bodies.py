"""What each process of a cell runs, chosen inside the fork: naming a body must not import the stack into pytest."""

from __future__ import annotations

import importlib

from tests.jobs.launcher import RankContext


def wait_for_the_imports(context: RankContext) -> None:
    """Nothing: a rank that ends has seen the server's imports end."""


def probe(context: RankContext) -> None:
    """What a rank finds before the first case."""
    importlib.import_module("tests.jobs.probe_rank").look(context)


def train(context: RankContext) -> None:
    """The ranks: by the case's trainer, or its path."""
    case = context.payload["case"]
    if case.get("path") == "direct":
        module = "tests.jobs.fp16_direct"
    elif case.get("trainer") == "trl":
        module = "tests.jobs.trl_trainer"
    elif case.get("trainer") == "ms-swift":
        module = "tests.jobs.swift.trainer"
    elif context.payload["job"] == "engine-sweep":
        module = "tests.jobs.sweep_engine"
    else:
        module = "tests.jobs.engine"
    importlib.import_module(module).train(context)


def first_norm(context: RankContext) -> None:
    """The norm that loose and binding clipping refer to."""
    importlib.import_module("tests.jobs.referee").measure_first_norm(context)


def referee(context: RankContext) -> None:
    """The reference and the evidence of the steps."""
    importlib.import_module("tests.jobs.referee").write_steps(context)
