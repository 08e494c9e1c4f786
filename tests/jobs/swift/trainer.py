"""A case through ms-swift's own command: one process, which starts `swift` as a user does and reads its log.

ms-swift brings its own launcher (torchrun), which needs a port: a free one. Its ranks record themselves
(`tests/jobs/swift/rank.py`); the norm that is judged is the one in its own logging.jsonl.
"""

from __future__ import annotations

import json
import os
import re
import socket
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from tests.jobs import corrections
from tests.jobs.launcher import RankContext
from tests.jobs.recorder import RankRecord
from tests.jobs.registry import workload_for
from tests.jobs.swift import grpo, release, sft
from tests.jobs.swift.flags import ORDER

COMMANDS: Mapping[str, Any] = {"grpo-lora": grpo, "zero3-custom-adapter": sft}
"""What swift is told, by job: `write_inputs` and `arguments`."""
_ERROR = re.compile(r"(\[rank\d+\]: )?(?P<said>[A-Za-z_][\w.]*(Error|Exception): .*)")
LOGGED_DIGITS = 8
"""Decimals that ms-swift rounds what it logs to."""


def free_port() -> int:
    """A port that nothing listens at now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def train(context: RankContext) -> None:
    """Body of the process that runs an ms-swift case; leaves a record of each of swift's ranks."""
    payload = context.payload
    folder = context.workdir / "swift"
    folder.mkdir()
    command = COMMANDS[payload["job"]]
    command.write_inputs(workload_for(payload), folder)
    order = folder / "order.json"
    order.write_text(json.dumps({"payload": dict(payload), "workdir": str(context.workdir)}))
    plugins = [corrections.FOLDER / f"{name.partition('=')[0]}.py" for name in payload["corrections"]]
    swift = Path(sys.executable).with_name("swift")
    # What the fork was started with names this process's place, not those of swift's ranks.
    environment = {k: v for k, v in os.environ.items() if k not in ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_SIZE")}
    environment |= {
        ORDER: str(order),
        "NPROC_PER_NODE": str(payload["world_size"]),
        "MASTER_PORT": str(free_port()),
        "LOCAL_SIZE": str(payload["world_size"]),
        "USE_HF": "1",
        "MODELSCOPE_CACHE": str(folder / "cache"),
        **corrections.modes(payload["corrections"]),
    }
    code, error = run([str(swift), *command.arguments(payload, folder, plugins, release.installed())], environment)
    paths = [context.workdir / f"rank{rank}.pt" for rank in range(int(payload["world_size"]))]
    if not all(path.is_file() for path in paths):
        raise RuntimeError(f"swift ended with exit code {code} before its ranks had recorded anything: {error}")
    records = [torch.load(path, weights_only=False) for path in paths]
    take_logged(records, logged(folder / "output" / "logging.jsonl"))
    for path, record in zip(paths, records, strict=True):
        torch.save(record, path)


def run(command: Sequence[str], environment: Mapping[str, str]) -> tuple[int, str]:
    """Run it to its end; what it says goes where we say things. Its exit code, and the first error that it named."""
    error = "it named no error"
    with subprocess.Popen(
        command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, errors="replace"
    ) as swift:
        assert swift.stdout is not None
        for line in swift.stdout:
            print(line, end="", flush=True)
            if error == "it named no error" and (match := _ERROR.match(line)):
                error = match["said"]
    return swift.returncode, error


def logged(path: Path) -> list[dict[str, Any]]:
    """The training records of logging.jsonl."""
    lines = path.read_text().splitlines() if path.is_file() else []
    return [entry for entry in map(json.loads, lines) if "loss" in entry]


def take_logged(records: list[RankRecord], entries: list[dict[str, Any]]) -> None:
    """Report the norm that ms-swift logged; that it is not the engine's is a violation of its own."""
    for record in records:
        for index, step in enumerate(record.steps):
            engine = step.grad_norm_reported
            rounded = None if engine is None else round(engine, LOGGED_DIGITS)
            if index >= len(entries):
                step.violations.append("ms-swift logged nothing of this step")
                continue
            norm = entries[index].get("grad_norm")
            if record.rank == 0 and norm != rounded:
                step.violations.append(f"ms-swift logged grad_norm {norm}, the engine says {engine}")
            step.grad_norm_reported = (None if norm is None else float(norm)) if record.rank == 0 else rounded
