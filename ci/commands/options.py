"""The options that select cells, declared once for `plan`, `run` and whatever else selects.

`selection` turns them into a `ci.plan.Selection`; options of the contract whose code is still to come are refused
here with one sentence, so that no command can half support them.
"""

from __future__ import annotations

from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer
from packaging.specifiers import InvalidSpecifier, SpecifierSet
from packaging.utils import canonicalize_name

from ci.errors import UsageError
from ci.installed import host_python, installed_packages
from ci.matrix import CURRENT, Corrections
from ci.plan import DEFAULT_BACKEND, Selection

__all__ = ["DEFAULT_BACKEND", "Corrections"]


class RuntimeName(StrEnum):
    """Where a job's process runs."""

    DOCKER = "docker"
    VENV = "venv"
    HOST = "host"


Backend = Annotated[str, typer.Option("--backend", metavar="ID", help="cpu, cuda or npu.")]
Lane = Annotated[
    str | None,
    typer.Option("--lane", metavar="ID", help="Which cells: pull-request (default), nightly, weekly or reports."),
]
Stacks = Annotated[
    list[str] | None,
    typer.Option(
        "--stack", metavar="ID", help="Replaces the lane's stacks; repeatable. `current`: what the interpreter has."
    ),
]
With = Annotated[
    list[str] | None,
    typer.Option("--with", metavar="PKG=VERSION|WHEEL|PATH", help="Replace one pin for this run; repeatable."),
]
Jobs = Annotated[list[str] | None, typer.Option("--job", metavar="ID", help="Only this job; repeatable.")]
Cases = Annotated[
    list[str] | None,
    typer.Option("--case", metavar="KEY=VALUE[,KEY=VALUE]", help="Only these cases; comma is and, repeating is or."),
]
Runtime = Annotated[
    RuntimeName | None, typer.Option("--runtime", help="Default: docker if an engine answers, else venv.")
]
Place = Annotated[RuntimeName, typer.Option("--runtime", help="Where the cells run: docker or venv.")]
Python = Annotated[str | None, typer.Option("--python", metavar="EXE", help="The interpreter of --runtime host.")]
CorrectionsChoice = Annotated[
    Corrections, typer.Option("--corrections", help="Correct what the ledger has a correction for; `both`: beside.")
]
WorldSize = Annotated[int | None, typer.Option("--world-size", metavar="N", help="For cells that do not fix it.")]
Devices = Annotated[
    str | None, typer.Option("--devices", metavar="0,1", help="Only these of the backend's devices, by number.")
]
ShareDevices = Annotated[
    bool, typer.Option("--share-devices", help="Take devices too that another process uses; default: leave them out.")
]
Shard = Annotated[str | None, typer.Option("--shard", metavar="I/N", help="The i-th of n equally long parts.")]
Adapter = Annotated[
    str | None, typer.Option("--adapter", metavar="FILE.py:CLASS", help="Your own module in zero3-custom-adapter.")
]
Versions = Annotated[
    list[str] | None,
    typer.Option("--versions", metavar="PKG=VERSION[,...]", help="Releases, or ranges such as 'deepspeed>=0.18'."),
]
DsConfig = Annotated[
    Path | None, typer.Option("--ds-config", metavar="FILE.json", help="Your own DeepSpeed configuration, as a case.")
]


def device_numbers(text: str | None, backend: str) -> tuple[str, ...] | None:
    """--devices as numbers, each once; None where it was not given."""
    if text is None:
        return None
    if backend == DEFAULT_BACKEND:
        raise UsageError(f"--devices: backend {backend} has no devices to choose from; leave it out")
    numbers = tuple(str(int(word)) if word.strip().isdecimal() else word for word in text.split(","))
    if not all(number.isdecimal() for number in numbers) or len(set(numbers)) < len(numbers):
        raise UsageError(f"--devices: found {text!r}; expected numbers, each once, such as 0,1")
    return numbers


def selection(
    *,
    backend: str,
    lane: str | None,
    stacks: list[str] | None,
    replacements: list[str] | None,
    jobs: list[str] | None,
    cases: list[str] | None,
    runtime: RuntimeName | None,
    python: str | None,
    corrections: Corrections,
    world_size: int | None,
    devices: tuple[str, ...] | None,
    asked: tuple[str, ...] | None,
    shard: str | None,
    adapter: str | None,
    ds_config: Path | None,
) -> Selection:
    """The options as a Selection; looks into the given interpreter where `current` asks for it.

    devices: the numbers there are for a case. asked: those of --devices.
    """
    if python is not None and runtime is not RuntimeName.HOST:
        raise UsageError("--python names the interpreter of --runtime host; give both")
    installed = None
    if stacks and CURRENT in stacks and runtime is RuntimeName.HOST:
        installed = installed_packages(host_python(python))
    repeat: list[str] = []
    if runtime is not None:
        repeat += ["--runtime", runtime]
    if python is not None:
        repeat += ["--python", python]
    if asked is not None:
        repeat += ["--devices", ",".join(asked)]
    return Selection(
        backend=backend,
        lane=lane,
        stacks=tuple(stacks or ()),
        jobs=tuple(jobs or ()),
        cases=tuple(cases or ()),
        replacements=tuple(replacements or ()),
        world_size=world_size,
        devices=devices,
        shard=shard,
        adapter=adapter,
        ds_config=ds_config,
        corrections=corrections,
        current=installed,
        repeat=tuple(repeat),
    )


def pins(words: list[str]) -> dict[str, SpecifierSet]:
    """What --versions allows, by canonical package name."""
    allowed: dict[str, SpecifierSet] = {}
    for word in (part.strip() for words_ in words for part in words_.split(",")):
        name = word[: len(word) - len(word.lstrip("abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789-_."))]
        rest = word[len(name) :].strip()
        specifier = f"={rest}" if rest.startswith("=") and not rest.startswith("==") else rest
        try:
            releases = SpecifierSet(specifier)
        except InvalidSpecifier as error:
            raise UsageError(f"--versions: found {word!r}; expected PKG=VERSION, such as deepspeed=0.18.9") from error
        if not name or not rest:
            raise UsageError(f"--versions: found {word!r}; expected PKG=VERSION, such as deepspeed=0.18.9")
        key = canonicalize_name(name)
        allowed[key] = allowed.get(key, SpecifierSet()) & releases
    return allowed
