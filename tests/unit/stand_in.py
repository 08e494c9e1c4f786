"""A stand-in for a stack: a process that reads the order and writes evidence as it is told to, cell by cell.

It tests our orchestration only (order, limits, interrupts, records); what the libraries do is tested in a stack.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path

from ci.execute import Request
from ci.matrix import Matrix
from ci.plan import Cell, Plan, PlannedStack
from ci.provision.process import RunningProcess
from ci.provision.runtime import Environment, Override, Recipe, RuntimeId
from ci.runrecord import Context

PINS = {"torch": "2.13.0+cpu", "deepspeed": "0.19.8"}

STACK = """
import json, os, subprocess, sys, time
order = json.load(open(sys.argv[1])); results = sys.argv[2]; behaviour = json.loads(os.environ["BEHAVIOUR"])
def evidence(cell, norm):
    step = {"index": 0, "grad_norm_reported": [norm] * cell["world_size"], "grad_norm_true": 1.0,
            "not_judged": {name: "stand-in" for name in
                           ("forward", "gradient_used", "update", "ranks_agree", "loss_scale", "consistency")}}
    return json.dumps({"cell": cell["id"], "pins": order["stack"]["pins"], "accelerator": "cpu", "device": "cpu",
                       "world_size": cell["world_size"], "steps_expected": 1, "steps": [step], "duration_s": 0.1})
def write(text):
    with open(results + "/evidence.jsonl", "a") as stream:
        stream.write(text)
print("stand-in started", flush=True)
for cell in order["cells"]:
    open(results + "/logs/" + cell["id"].replace("/", "__") + ".log", "w").close()
    what = behaviour.get(cell["id"].rsplit("/", 1)[1], "ok")
    if what == "ok":
        write(evidence(cell, 1.0) + "\\n")
    elif what == "wrong":
        write(evidence(cell, 2.0) + "\\n")
    elif what == "foreign":
        write(json.dumps({**json.loads(evidence(cell, 1.0)), "schema": 2}) + "\\n")
    elif what == "half":
        write(evidence(cell, 1.0)[:40]); sys.exit(3)
    elif what == "crash":
        print("Fatal Python error: Segmentation fault", flush=True); sys.exit(1)
    elif what == "killed":
        os.kill(os.getpid(), 9)
    elif what == "hang":
        # A rank is a session of its own, so ending the process group is not enough.
        child = subprocess.Popen(["sleep", "600"], start_new_session=True)
        open(results + "/child.pid", "w").write(str(child.pid))
        time.sleep(600)
"""


@dataclass
class StandInRuntime:
    """Answers to `Runtime`; behaviour: {last part of a cell id: ok, wrong, foreign, half, crash, killed, hang}."""

    behaviour: Mapping[str, str] = field(default_factory=dict)
    packages: Mapping[str, str] = field(default_factory=lambda: PINS)
    unmakeable: Mapping[str, Exception] = field(default_factory=dict)
    started: list[int] = field(default_factory=list)

    @property
    def id(self) -> RuntimeId:
        return "venv"

    def describe(self) -> str:
        return "venv: stand-in"

    def provision(self, recipe: Recipe, overrides: Sequence[Override] = ()) -> Environment:
        if recipe.stack in self.unmakeable:
            raise self.unmakeable[recipe.stack]
        return Environment("venv", recipe.stack, sys.executable, self.packages, reused=True)

    def path_inside(self, path: Path) -> str:
        return f"/inside/{path.name}"

    def start(
        self,
        environment: Environment,
        order_file: Path,
        results_dir: Path,
        workers: int = 1,
        extra_env: Mapping[str, str] | None = None,
        inputs: Sequence[Path] = (),
    ) -> RunningProcess:
        self.started.append(workers)
        command = [sys.executable, "-c", STACK, str(order_file), str(results_dir)]
        env = {**os.environ, "BEHAVIOUR": json.dumps(dict(self.behaviour))}
        return RunningProcess(command, env=env, cwd=results_dir, log_path=results_dir / "pytest.log")


def matrix() -> Matrix:
    """The smallest matrix with a tolerance for the stand-in's one judged check."""
    stack = {"backend": "cpu", "about": "x", "python": "3.11", "lock": "x.txt", "pins": PINS}
    tolerance = {"tolerance": 1e-3, "largest": 1e-4, "repeats": 30}
    return Matrix.model_validate(
        {
            "schema": 1,
            "package_indexes": {},
            "backends": {"cpu": {"accelerator": "cpu", "communication": "gloo", "start_method": "forkserver"}},
            "stacks": {"newest": stack, "stable": stack},
            "lanes": {},
            "jobs": {"grpo-lora": {"about": "x", "requires": {}, "keys": {}, "timeout_s": 10}},
            "tolerances": [
                {
                    "stages": [0],
                    "dtype": "bf16",
                    "gradient_accumulation_steps": [1],
                    "checks": {"reported_norm": tolerance},
                }
            ],
            "defects": [],
        }
    )


def plan(names: Sequence[str], stacks: Sequence[str] = ("newest",), gated: Mapping[str, str] | None = None) -> Plan:
    """These cases on these stacks."""
    cells = [
        Cell(
            id=f"cpu/{stack}/grpo-lora/{name}",
            backend="cpu",
            stack=stack,
            job="grpo-lora",
            case={"zero_stage": 0, "dtype": "bf16"},
            world_size=2,
            timeout_s=10,
            gated=(gated or {}).get(name),
            command=f"nox -s cpu-zero -- --stack {stack} --case {name}",
        )
        for stack in stacks
        for name in names
    ]
    planned = {stack: PlannedStack(stack, PINS, Path("x.txt"), check_pins=True) for stack in stacks}
    return Plan("cpu", "pull-request", planned, tuple(cells))


def request(out: Path, plan: Plan, runtime: StandInRuntime, *, fail_fast: bool = False) -> Request:
    """A run of the plan in the stand-in."""
    started = datetime(2026, 1, 2, tzinfo=UTC).isoformat()
    recipes = {
        name: Recipe(name, "cpu", "3.11", Path("x.txt"), PINS, Path("docker/cpu.Dockerfile"), "debian")
        for name in plan.stacks
    }
    context = Context(command="python -m ci run", backend="cpu", runtime=runtime.id, started=started)
    return Request(plan, matrix(), runtime, recipes, context, out, fail_fast=fail_fast)
