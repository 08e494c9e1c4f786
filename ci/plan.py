"""Matrix + Selection -> Plan: which cells there are, in which order, which of them cannot run with these pins.

Everything that a user can select is resolved here and nowhere else, so that `plan`, `run`, a dry run and the
generated workflow agree on every cell id.
"""

from __future__ import annotations

import shlex
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from packaging.specifiers import SpecifierSet
from packaging.utils import canonicalize_name

from ci import cann, cases, claims
from ci.dsconfig import case_of_ds_config
from ci.durations import Durations, parts
from ci.errors import EnvironmentUnavailable, NoDevice, NothingToRun, UsageError, choices
from ci.matrix import CURRENT, Corrections, Exclusion, Job, Lane, Matrix, Scalar, Stack, Where
from ci.replacements import Replacement, parse_replacement
from ci.userfiles import check_adapter, check_ds_config

DEFAULT_LANE = "pull-request"
DEFAULT_BACKEND = "cpu"
DEFAULT_WORLD_SIZE = 2
ADAPTER_JOB = "zero3-custom-adapter"
"""The job that `--adapter` runs a user's own module through."""
DS_CONFIG_JOB = "grpo-lora"
"""The job that a user's own DeepSpeed configuration (`--ds-config`) is a case of."""


@dataclass(frozen=True)
class Selection:
    """What the user asked for, as typed.

    lane: None is that of the stacks named, or the pull request's. devices: the numbers of the devices there are for a
    case; None where that is not known, or the backend has none.
    current: the packages installed in the interpreter given, needed where `current` is among the stacks.
    repeat: further options of `run` that the command repeating one cell has to carry (`--runtime host`).
    """

    backend: str = DEFAULT_BACKEND
    lane: str | None = None
    stacks: tuple[str, ...] = ()
    jobs: tuple[str, ...] = ()
    cases: tuple[str, ...] = ()
    replacements: tuple[str, ...] = ()
    world_size: int | None = None
    devices: tuple[str, ...] | None = None
    shard: str | None = None
    adapter: str | None = None
    ds_config: Path | None = None
    corrections: Corrections = Corrections.OFF
    current: Mapping[str, str] | None = None
    repeat: tuple[str, ...] = ()


@dataclass(frozen=True)
class PlannedStack:
    """One stack as this run will have it.

    pins: what must be installed, replacements applied; a package replaced by a path whose version is not known yet
    has no pin. lock: None for `current`. nearest: for `current`, the shipped stack that differs least. cann: of its
    base image, where that is one of CANN; None for `current`. lane: what it runs where no lane is asked for.
    """

    id: str
    pins: Mapping[str, str]
    lock: Path | None
    check_pins: bool
    replacements: tuple[Replacement, ...] = ()
    nearest: str | None = None
    cann: str | None = None
    lane: str = DEFAULT_LANE


@dataclass(frozen=True)
class Cell:
    """Backend x stack x case: the unit that gets a verdict.

    case: every key of the job, in the contract's order. gated: why it is `not run`, or None. command: the one
    command that repeats just this cell. adapter, ds_config: a user's own file in place of the shipped one, by its
    name (an adapter with its class); the id does not tell. corrections: as asked for, `name` or `name=mode`; behind a
    `+` at the end of the id.
    """

    id: str
    backend: str
    stack: str
    job: str
    case: Mapping[str, Scalar]
    world_size: int
    timeout_s: int
    gated: str | None
    command: str
    corrections: tuple[str, ...] = ()
    adapter: str | None = None
    ds_config: str | None = None


@dataclass(frozen=True)
class Plan:
    """The cells of one run, stack by stack, and the stacks they need."""

    backend: str
    lane: str
    stacks: Mapping[str, PlannedStack]
    cells: tuple[Cell, ...]
    selection: Selection = field(default_factory=Selection)

    @property
    def runnable(self) -> tuple[Cell, ...]:
        """The cells that these pins let run."""
        return tuple(cell for cell in self.cells if cell.gated is None)

    def require_runnable(self) -> None:
        """Raise NothingToRun where the pins let no cell run: such a run would be green and test nothing.

        NoDevice where it is for want of devices.
        """
        if not self.runnable:
            reasons = _unique(cell.gated for cell in self.cells if cell.gated is not None)
            if all(lacks_devices(self.selection, cell.world_size) for cell in self.cells):
                raise NoDevice(f"no cell can run with these devices: {'; '.join(reasons)}")
            raise NothingToRun(f"no cell can run with these pins: {'; '.join(reasons)}")


def lacks_devices(selection: Selection, world_size: int) -> str | None:
    """Why the devices given cannot run a case of this world size; a rank needs one for itself."""
    if selection.devices is None or world_size <= len(selection.devices):
        return None
    there = ", ".join(selection.devices) or "none"
    return f"needs {world_size} devices, a rank each; those to be used are: {there}"


def make_plan(matrix: Matrix, selection: Selection, durations: Durations | None = None) -> Plan:
    """All cells selected, gated ones with their reason. UsageError or NothingToRun where there are none.

    durations: what a shard is an equal part by; without them all cells count alike.
    """
    backend = matrix.backends.get(selection.backend)
    if backend is None:
        raise UsageError(f"unknown backend {selection.backend!r}; {choices(selection.backend, matrix.backends)}")
    if backend.unavailable is not None:
        raise EnvironmentUnavailable(f"backend {selection.backend}: {backend.unavailable}")
    lane_id = selection.lane or _own_lane(matrix, selection.stacks)
    lane = matrix.lanes.get(lane_id)
    if lane is None:
        raise UsageError(f"unknown lane {lane_id!r}; {choices(lane_id, matrix.lanes)}")
    selection = replace(selection, lane=lane_id)
    if selection.world_size is not None and selection.world_size < 1:
        raise UsageError(f"--world-size: found {selection.world_size}; expected 1 or more")
    shard = _shard(selection.shard)
    jobs = _jobs(matrix, selection)
    filters = [cases.parse_filter(words, jobs) for words in selection.cases]
    stacks = _stacks(matrix, lane, selection)

    cells: list[Cell] = []
    chosen = {job_id: _job_cases(matrix, lane, job_id, selection) for job_id in jobs}
    kept = {job_id: [case for case in of_job if _wanted(job_id, case, filters)] for job_id, of_job in chosen.items()}
    if not any(kept.values()):
        raise NothingToRun(_nothing(matrix, selection, jobs, filters))
    for stack in stacks.values():
        for job_id, of_job in kept.items():
            job = matrix.jobs[job_id]
            reasons: dict[int, str | None] = {}
            for case in of_job:
                key = case.requirements
                if key not in reasons:
                    reasons[key] = _gate(job, case.values, stack)
                plain = _cell(selection, stack, job_id, job, case, reasons[key])
                cells += _with_corrections(matrix, selection.corrections, stack, plain)
    if shard is not None:
        number, count = shard
        cells = list(shards(cells, count, durations)[number - 1])
        if not cells:
            raise NothingToRun(f"--shard {selection.shard}: no cell is left for this shard")
    used = {cell.stack for cell in cells}
    stacks = {name: stack for name, stack in stacks.items() if name in used}
    return Plan(selection.backend, lane_id, stacks, tuple(cells), selection)


def shards(cells: Sequence[Cell], count: int, durations: Durations | None) -> tuple[tuple[Cell, ...], ...]:
    """The cells in parts that take equally long; a gated one takes no time."""
    seconds = [1.0 if durations is None else 0.0 if cell.gated else durations.of(cell.id) for cell in cells]
    return tuple(tuple(cells[position] for position in part) for part in parts(seconds, count))


@dataclass(frozen=True)
class _LaneCase:
    """A case of a lane before it meets a stack.

    selecting: the keys that select exactly this case within the lane. requirements: which of the job's per-case
    requirements apply, as bits.
    """

    name: str
    values: dict[str, Scalar]
    selecting: tuple[str, ...]
    requirements: int


def _unique(words: Iterable[str]) -> list[str]:
    return list(dict.fromkeys(words))


def _shard(text: str | None) -> tuple[int, int] | None:
    if text is None:
        return None
    number, slash, count = text.partition("/")
    if slash and number.isdecimal() and count.isdecimal() and 1 <= int(number) <= int(count):
        return int(number), int(count)
    raise UsageError(f"--shard: found {text!r}; expected i/n with 1 <= i <= n, such as 1/4")


def _jobs(matrix: Matrix, selection: Selection) -> dict[str, Job]:
    """The jobs asked for, in the matrix's order; all where none is named."""
    for job in selection.jobs:
        if job not in matrix.jobs:
            raise UsageError(f"unknown job {job!r}; {choices(job, matrix.jobs)}")
    if selection.adapter is not None and selection.ds_config is not None:
        raise UsageError("--adapter and --ds-config belong to different jobs; give one of them")
    wanted = set(selection.jobs) or set(matrix.jobs)
    for option, value, only in (
        ("--adapter", selection.adapter, ADAPTER_JOB),
        ("--ds-config", selection.ds_config, DS_CONFIG_JOB),
    ):
        if value is not None:
            if only not in wanted:
                raise UsageError(f"{option} belongs to job {only}, which --job leaves out")
            wanted = {only}
    if selection.adapter is not None:
        check_adapter(selection.adapter)
    return {job_id: job for job_id, job in matrix.jobs.items() if job_id in wanted}


def _own_lane(matrix: Matrix, stacks: Sequence[str]) -> str:
    """The lane that these stacks run where none is asked for."""
    lanes = {matrix.stacks[name].lane or DEFAULT_LANE for name in stacks if name in matrix.stacks} or {DEFAULT_LANE}
    if len(lanes) > 1:
        raise UsageError(
            f"stacks {_list(stacks)} have lanes of their own, {_list(sorted(lanes))}; name one with --lane"
        )
    return lanes.pop()


def _stacks(matrix: Matrix, lane: Lane, selection: Selection) -> dict[str, PlannedStack]:
    own = {name: stack for name, stack in matrix.stacks.items() if stack.backend == selection.backend}
    if selection.stacks:
        for name in selection.stacks:
            if name != CURRENT and name not in matrix.stacks:
                raise UsageError(f"unknown stack {name!r}; {choices(name, (*own, CURRENT))}")
            if name != CURRENT and name not in own:
                there = matrix.stacks[name].backend
                raise UsageError(f"stack {name} belongs to backend {there}; those of {selection.backend}: {_list(own)}")
        names = _unique(selection.stacks)
    else:
        names = [name for name in lane.stacks if name in own]
        if not names:
            raise NothingToRun(f"lane {selection.lane} has no stack of backend {selection.backend}")
    if CURRENT in names:
        return {CURRENT: _current(own, names, selection)}
    replacements = tuple(parse_replacement(text) for text in selection.replacements)
    for package in (replacement.package for replacement in replacements):
        if sum(replacement.package == package for replacement in replacements) > 1:
            raise UsageError(f"--with {package} is given twice")
        for name in names:
            if package not in own[name].pins:
                raise UsageError(f"--with: stack {name} has no pin of {package!r}; {choices(package, own[name].pins)}")
    stacks = {}
    for name in names:
        pins = dict(own[name].pins)
        for replacement in replacements:
            if replacement.version is None:
                del pins[replacement.package]
            else:
                pins[replacement.package] = replacement.version
        level = own[name].cann
        if level is not None and (wrong := cann.mismatch(matrix.cann, level, pins)) is not None:
            raise UsageError(f"--with: stack {name}: found {wrong[0]}; expected {wrong[1]}")
        lock = Path(own[name].lock)
        stacks[name] = PlannedStack(
            name,
            pins,
            lock,
            check_pins=True,
            replacements=replacements,
            cann=level,
            lane=own[name].lane or DEFAULT_LANE,
        )
    return stacks


def _current(own: Mapping[str, Stack], names: Sequence[str], selection: Selection) -> PlannedStack:
    """`current`: the pins are what is installed, and the shipped stack that differs in fewest of them is named."""
    if len(names) > 1:
        raise UsageError("--stack current is the interpreter given; it cannot be combined with other stacks")
    if selection.replacements:
        raise UsageError("--with makes an environment; --stack current takes the one that is there. Give one of them")
    if selection.current is None:
        raise UsageError("--stack current needs --runtime host: it means what is installed in the interpreter given")
    installed = {canonicalize_name(package): version for package, version in selection.current.items()}
    pinned = {package for stack in own.values() for package in stack.pins}
    pins = {name: installed[canonicalize_name(name)] for name in sorted(pinned) if canonicalize_name(name) in installed}

    def differing(name: str) -> int:
        return sum(pins.get(package) != version for package, version in own[name].pins.items())

    nearest = min(own, key=lambda name: (differing(name), name), default=None)
    return PlannedStack(CURRENT, pins, None, check_pins=False, nearest=nearest)


def _list(words: Iterable[str]) -> str:
    return ", ".join(words) or "none"


def _excluded(exclusions: Iterable[Exclusion], case: Mapping[str, Scalar]) -> bool:
    return any(cases.matches(exclusion.where, case) for exclusion in exclusions)


def _job_cases(matrix: Matrix, lane: Lane, job_id: str, selection: Selection) -> list[_LaneCase]:
    """The lane's cases of one job, each once, in the lane's order."""
    job = matrix.jobs[job_id]
    patterns: Sequence[Where] = lane.cases.get(job_id, ())
    if selection.ds_config is not None:
        patterns = (case_of_ds_config(check_ds_config(selection.ds_config), job),)
    exclusions = (*job.exclude, *lane.exclude.get(job_id, ()))
    found: dict[str, dict[str, Scalar]] = {}
    for pattern in patterns:
        fixed = "world_size" in pattern
        for given in cases.expand(pattern):
            if selection.world_size is not None and not fixed and "world_size" in job.keys:
                given["world_size"] = selection.world_size
            values = cases.resolve(job, given)
            if not _excluded(exclusions, values):
                found.setdefault(cases.name(job, values), values)
    selecting = _selecting(job, list(found.values()))
    result = []
    for (name, values), keys in zip(found.items(), selecting, strict=True):
        bits = sum(1 << i for i, extra in enumerate(job.case_requires) if cases.matches(extra.where, values))
        result.append(_LaneCase(name, values, keys, bits))
    return result


def _selecting(job: Job, all_values: Sequence[Mapping[str, Scalar]]) -> list[tuple[str, ...]]:
    """For each case the keys that `--case` needs to select it alone: those its id shows, and as few more as do it.

    Sets of cases are bit masks, so that a grid of thousands stays fast.
    """
    keys = job.ordered_keys
    masks: dict[tuple[str, str], int] = {}
    for index, values in enumerate(all_values):
        for key in keys:
            spot = (key, cases.text(values[key]))
            masks[spot] = masks.get(spot, 0) | 1 << index
    result = []
    for values in all_values:
        chosen = set(cases.shown(job, values))
        matching = (1 << len(all_values)) - 1
        for key in chosen:
            matching &= masks[key, cases.text(values[key])]
        while matching.bit_count() > 1:
            rest = [key for key in keys if key not in chosen]
            best = min(rest, key=lambda key: (matching & masks[key, cases.text(values[key])]).bit_count())
            chosen.add(best)
            matching &= masks[best, cases.text(values[best])]
        result.append(tuple(key for key in keys if key in chosen))
    return result


def _wanted(job_id: str, case: _LaneCase, filters: Sequence[Mapping[str, Mapping[str, Scalar]]]) -> bool:
    if not filters:
        return True
    return any(job_id in wanted and cases.matches(wanted[job_id], case.values) for wanted in filters)


def _nothing(
    matrix: Matrix,
    selection: Selection,
    jobs: Mapping[str, Job],
    filters: Sequence[Mapping[str, Mapping[str, Scalar]]],
) -> str:
    """Why the selection is empty, and in which lanes it is not."""
    asked = " ".join([*(f"--job {job}" for job in selection.jobs), *(f"--case {words}" for words in selection.cases)])
    message = f"no case of lane {selection.lane} matches {asked or 'this selection'}"
    if selection.ds_config is not None:
        return message
    elsewhere = []
    for lane_id, lane in matrix.lanes.items():
        found = sum(
            _wanted(job_id, case, filters) for job_id in jobs for case in _job_cases(matrix, lane, job_id, selection)
        )
        if found:
            elsewhere.append(f"--lane {lane_id} ({found} case{'s' if found > 1 else ''})")
    return f"{message}; found with {' or '.join(elsewhere)}" if elsewhere else f"{message}, nor any of another lane"


def _gate(job: Job, case: Mapping[str, Scalar], stack: PlannedStack) -> str | None:
    """Why these pins cannot run this case; a package whose version is not known yet gates nothing."""
    unknown = {replacement.package for replacement in stack.replacements if replacement.version is None}
    needs = [(job.requires, "")]
    needs += [(extra.requires, extra.reason) for extra in job.case_requires if cases.matches(extra.where, case)]
    for requires, reason in needs:
        for package, specifier in requires.items():
            if package in unknown:
                continue
            because = f" ({reason})" if reason else ""
            version = stack.pins.get(package)
            if version is None:
                return f"needs {package} {specifier}, which stack {stack.id} does not have{because}"
            if not SpecifierSet(specifier).contains(version, prereleases=True):
                return f"needs {package} {specifier}, stack {stack.id} has {version}{because}"
    return None


def _cell(selection: Selection, stack: PlannedStack, job_id: str, job: Job, case: _LaneCase, gated: str | None) -> Cell:
    world_size = case.values.get("world_size", selection.world_size or DEFAULT_WORLD_SIZE)
    return Cell(
        id=f"{selection.backend}/{stack.id}/{job_id}/{case.name}",
        backend=selection.backend,
        stack=stack.id,
        job=job_id,
        case=case.values,
        world_size=int(world_size),
        timeout_s=job.timeout_s,
        gated=gated or lacks_devices(selection, int(world_size)),
        command=_command(selection, stack, job_id, case),
        adapter=None if selection.adapter is None else Path(selection.adapter).name,
        ds_config=None if selection.ds_config is None else selection.ds_config.name,
    )


def _with_corrections(matrix: Matrix, wanted: Corrections, stack: PlannedStack, plain: Cell) -> list[Cell]:
    """The cells of a case: as it is, corrected, or both. A package whose version is not known yet claims nothing."""
    if wanted is Corrections.OFF:
        return [plain]
    claiming = (entry for entry in matrix.defects if claims.claims(entry, plain.job, plain.case, stack.pins))
    corrected = [
        replace(
            plain,
            id=f"{plain.id}+{variant.suffix}",
            corrections=variant.corrections,
            command=f"{plain.command} --corrections on",
        )
        for variant in claims.variants(claiming, matrix.corrections)
    ]
    return [plain, *corrected] if wanted is Corrections.BOTH or not corrected else corrected


def _command(selection: Selection, stack: PlannedStack, job_id: str, case: _LaneCase) -> str:
    """The one command that selects this cell again and nothing else."""
    words = ["nox", "-s", f"{selection.backend}-zero", "--"]
    if selection.lane is not None and selection.lane != stack.lane:
        words += ["--lane", selection.lane]
    words += ["--stack", stack.id, "--job", job_id]
    if selection.ds_config is None:
        words += ["--case", ",".join(f"{key}={cases.text(case.values[key])}" for key in case.selecting)]
    else:
        words += ["--ds-config", str(selection.ds_config)]
    if selection.world_size is not None:
        words += ["--world-size", str(selection.world_size)]
    if selection.adapter is not None:
        words += ["--adapter", selection.adapter]
    for replacement in selection.replacements:
        words += ["--with", replacement]
    return shlex.join([*words, *selection.repeat])
