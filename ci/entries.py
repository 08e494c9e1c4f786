"""The entries of matrix.yaml as frozen Pydantic models: their shape, and nothing that needs a second entry to check.

What two entries must agree on (a lane's stack exists, a defect's key is known) is in `ci.contradictions`; reading the
file with its line numbers is in `ci.matrix`, which is also where everybody else imports these models from.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from enum import StrEnum
from typing import Annotated, Any, Literal

from packaging.specifiers import InvalidSpecifier, SpecifierSet
from packaging.version import InvalidVersion, Version
from pydantic import AfterValidator, BaseModel, ConfigDict, Field, PositiveInt, field_validator, model_validator

Scalar = bool | int | float | str
Check = Literal["forward", "reported_norm", "gradient_used", "update", "ranks_agree", "loss_scale", "consistency"]
CHECKS: tuple[Check, ...] = (
    "forward",
    "reported_norm",
    "gradient_used",
    "update",
    "ranks_agree",
    "loss_scale",
    "consistency",
)
"""The checks of one optimizer step (contract), in the order in which they are reported."""

CASE_KEYS = (
    "trainer",
    "zero_stage",
    "dtype",
    "gradient_accumulation_steps",
    "gradient_clipping",
    "optimizer",
    "world_size",
    "user_code",
    "path",
    "step_method",
    "loss_scale",
    "experts",
    "checkpointing",
    "frozen",
    "init",
    "num_iterations",
    "beta",
    "lora_b",
    "offload",
    "grad_accum_dtype",
    "backward_calls",
    "parameters",
    "param_groups",
    "weight_decay",
    "resume",
    "steps",
)
"""Every case key, in the order in which a cell id writes them (contract)."""

CURRENT = "current"
"""The stack that stands for whatever is installed in the interpreter given; no entry may have its name."""

MODE = "="
"""Between a correction and the mode it is asked for in: `zero3_guard=raise`."""

NEGATION = "not-"
"""Prefix of a value in `where` that matches everything but that value."""

_WORD = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*")


def _word(value: str) -> str:
    if not _WORD.fullmatch(value):
        raise ValueError("a word of letters, digits, '.', '_' and '-' (it becomes part of an address)")
    return value


def _specifier(value: str) -> str:
    try:
        SpecifierSet(value)
    except InvalidSpecifier as error:
        raise ValueError(f"a version specifier such as '>=0.17.6,<0.18.3' (PEP 440): {error}") from error
    return value


def _version(value: str) -> str:
    try:
        Version(value)
    except InvalidVersion as error:
        raise ValueError(f"one exact version such as 0.19.8 (PEP 440): {error}") from error
    return value


def _regex(value: str) -> str:
    try:
        re.compile(value)
    except re.error as error:
        raise ValueError(f"a regular expression: {error}") from error
    return value


def canonical(value: Scalar) -> Scalar:
    """1.0 and 1 are one value and have one spelling in a cell id."""
    return int(value) if isinstance(value, float) and value.is_integer() else value


def same(left: Scalar, right: Scalar) -> bool:
    """Equality that keeps true and 1 apart, which Python does not."""
    return isinstance(left, bool) == isinstance(right, bool) and left == right


Word = Annotated[str, AfterValidator(_word)]
Specifier = Annotated[str, AfterValidator(_specifier)]
ExactVersion = Annotated[str, AfterValidator(_version)]
Regex = Annotated[str, AfterValidator(_regex)]
Value = Annotated[Scalar, AfterValidator(canonical)]
ValueOrList = Value | tuple[Value, ...]
Where = Mapping[str, ValueOrList]


class Corrections(StrEnum):
    """Whether affected releases are corrected: never, wherever a correction exists, or in a second cell beside."""

    OFF = "off"
    ON = "on"
    BOTH = "both"


class Entry(BaseModel):
    """What all entries share: no unknown field, no change after loading."""

    model_config = ConfigDict(extra="forbid", frozen=True)


class PackageIndex(Entry):
    """A package index besides the host's own configuration."""

    url: str
    variable: Annotated[str, Field(description="environment variable that replaces the URL; '' switches it off")]


class Devices(Entry):
    """The devices of a backend: how processes see them, and how an engine hands them to a container.

    Of the ways to hand over, the first that an engine has is taken: an OCI runtime of the vendor, CDI, and then either
    `--gpus` or the device files with the folders of the driver. `{}` in `files` stands for a device's number.
    """

    visible: Annotated[str, Field(description="environment variable that lists the devices a process may use")]
    tool: Annotated[Literal["nvidia-smi", "npu-smi"], Field(description="what tells their health and who uses them")]
    driver: Annotated[Specifier | None, Field(description="releases of the driver that the stacks run on")] = None
    runtime: Annotated[str | None, Field(description="OCI runtime of the vendor, taken where the engine has it")] = None
    runtime_variable: Annotated[str | None, Field(description="environment variable that this runtime reads")] = None
    cdi: Annotated[str | None, Field(description="CDI kind, taken where the engine knows a device of it")] = None
    gpus: Annotated[bool, Field(description="whether --gpus hands them over")] = False
    files: Annotated[tuple[str, ...], Field(description="device files, those without a number for all")] = ()
    mounts: Annotated[tuple[str, ...], Field(description="files and folders of the driver, bound read-only")] = ()

    @model_validator(mode="after")
    def _one_way(self) -> Devices:
        if self.gpus == bool(self.files):
            raise ValueError("either `gpus: true` or device `files`: a way that every engine has")
        if (self.runtime is None) != (self.runtime_variable is None):
            raise ValueError("`runtime` and `runtime_variable` together: without the runtime the variable does nothing")
        return self


class Container(Entry):
    """What a container of a backend needs besides its devices. ulimits: -1 is no limit; stack and memlock in bytes."""

    shm_size: Annotated[str, Field(pattern=r"^[1-9][0-9]*[mg]$", description="size of /dev/shm")] = "1g"
    ipc: Literal["private", "host"] = "private"
    ulimits: dict[Word, int] = {}


class InstalledVersion(Entry):
    """A version that a rank looks up before the first case, from a file or from an attribute of a Python module.

    `{cann}` in `expected` is the stack's: with `--stack current`, which has none, what is found is only recorded.
    """

    name: Annotated[str, Field(description="what has this version, as run.json names it")]
    file: Annotated[str | None, Field(description="where it stands; $VARIABLE and * are filled in")] = None
    pattern: Annotated[Regex | None, Field(description="finds it in the file, as its only group")] = None
    attribute: Annotated[str | None, Field(pattern=r"^[\w.]+:\w+$", description="module:name of Python")] = None
    expected: Annotated[str | None, Field(description="what it must be; None: anything")] = None

    @model_validator(mode="after")
    def _one_source(self) -> InstalledVersion:
        if (self.file is None) == (self.attribute is None) or (self.file is None) != (self.pattern is None):
            raise ValueError("either `file` with `pattern`, or `attribute`")
        if self.pattern is not None and re.compile(self.pattern).groups != 1:
            raise ValueError("a pattern with one group: the version")
        return self


class Backend(Entry):
    """An accelerator with its collective library and its image. base_image: `{cann}` and `{python}` are a stack's."""

    accelerator: Annotated[str, Field(description="DeepSpeed's name of it")]
    communication: Annotated[str, Field(description="torch.distributed's name of its collective library")]
    start_method: Literal["forkserver", "spawn"]
    environment: Annotated[dict[str, str], Field(description="environment of the jobs")] = {}
    shims: Annotated[
        tuple[Word, ...], Field(description="of tests/jobs/shims.py, those that a case may need here")
    ] = ()
    training_arguments: Annotated[
        dict[str, Scalar], Field(description="what transformers' TrainingArguments need to be told here")
    ] = {}
    versions: Annotated[
        tuple[InstalledVersion, ...], Field(description="of driver and toolkit, looked up before the first case")
    ] = ()
    devices: Devices | None = None
    container: Container = Container()
    dockerfile: str | None = None
    base_image: str | None = None
    package_index: str | None = None
    lock_platform: Annotated[str, Field(description="uv's name of the platform that locks are resolved for")] = (
        "x86_64-manylinux_2_28"
    )
    packages: Annotated[tuple[str, ...], Field(description="what its runtime needs of each stack, unpinned")] = ()
    left_out: Annotated[tuple[str, ...], Field(description="what its locks leave out although a pin asks for it")] = ()
    never_run: Annotated[str | None, Field(description="said with every result: on what it has not run yet")] = None
    unavailable: Annotated[str | None, Field(description="why this backend cannot run anything yet")] = None


_HOSTED = re.compile(r"ubuntu-(latest|\d\d\.\d\d)(-arm)?")


class Runner(Entry):
    """Where workflows run the cells of a backend, and in which portions.

    shard_minutes: how much work of cells a job gets, by recorded durations; making the stack comes on top.
    """

    labels: Annotated[tuple[str, ...], Field(min_length=1, description="`runs-on`, such as the name of a scale set")]
    max_parallel: Annotated[PositiveInt, Field(description="jobs at the same time: as many as there are runners")]
    shard_minutes: PositiveInt
    timeout_minutes: PositiveInt

    @property
    def hosted(self) -> bool:
        """Whether it is a standard machine of GitHub's, new for each job. Anything else counts as one of ours."""
        return len(self.labels) == 1 and _HOSTED.fullmatch(self.labels[0]) is not None

    @model_validator(mode="after")
    def _time_for_a_shard(self) -> Runner:
        if self.timeout_minutes <= self.shard_minutes:
            raise ValueError(f"timeout_minutes above shard_minutes, which is {self.shard_minutes}")
        return self


class Stack(Entry):
    """A named set of exact pins. cann: the CANN of its base image, where the backend's image is one of CANN.

    forced: pins that another package of the stack declares it does not run with, each with its reason in `why`. lane:
    what it runs where no lane is asked for, instead of the pull request's.
    """

    backend: str
    about: str
    python: ExactVersion
    cann: str | None = None
    lock: str
    pins: dict[str, ExactVersion]
    forced: tuple[str, ...] = ()
    why: dict[str, str] = {}
    lane: str | None = None


class Exclusion(Entry):
    """Combinations that do not exist, with the reason."""

    where: Where
    reason: str


class Lane(Entry):
    """Which cells run when: each case is a pattern, a list of values in it is a product."""

    stacks: tuple[str, ...]
    cases: dict[str, tuple[Where, ...]]
    exclude: dict[str, tuple[Exclusion, ...]] = {}


class ConditionalDefault(Entry):
    """A default that depends on keys that come earlier in the contract's order."""

    where: Where
    value: Value


class CaseKey(Entry):
    """One key of a job's cases. In `values`, `integer` is any integer from 1 and `number` any number from 0."""

    values: Literal["integer", "number"] | tuple[Value, ...]
    default: Value | None = None
    default_when: tuple[ConditionalDefault, ...] = ()

    @property
    def allowed(self) -> tuple[Scalar, ...]:
        return (self.values,) if isinstance(self.values, str) else self.values

    def accepts(self, value: Scalar) -> bool:
        """Whether a case may have this value."""
        if isinstance(value, str):
            return value not in ("integer", "number") and value in self.allowed
        if any(same(value, known) for known in self.allowed):
            return True
        if isinstance(value, bool):
            return False
        if "integer" in self.allowed and isinstance(value, int) and value >= 1:
            return True
        return "number" in self.allowed and 0 <= value < float("inf")


class CaseRequirement(Entry):
    """Versions that only some cases of a job need."""

    where: Where
    requires: dict[str, Specifier]
    reason: str


class Job(Entry):
    """A regression job: what it needs and how its cases may vary."""

    about: str
    requires: dict[str, Specifier]
    case_requires: tuple[CaseRequirement, ...] = ()
    exclude: tuple[Exclusion, ...] = ()
    keys: dict[str, CaseKey]
    timeout_s: PositiveInt

    @property
    def ordered_keys(self) -> tuple[str, ...]:
        """This job's keys in the contract's order."""
        return tuple(key for key in CASE_KEYS if key in self.keys)


class CheckTolerance(Entry):
    """How far a check may be off, beside the largest error of the clean repeats it was set from."""

    tolerance: Annotated[float, Field(gt=0)]
    largest: Annotated[float, Field(ge=0)]
    repeats: PositiveInt

    @model_validator(mode="after")
    def _above_the_largest(self) -> CheckTolerance:
        if self.tolerance <= self.largest:
            raise ValueError(f"a tolerance above the largest clean error {self.largest:g}")
        return self


class Tolerance(Entry):
    """Tolerances of a group of cases: ZeRO stages, dtype, accumulation and, where they differ, job and trainers."""

    job: str | None = None
    trainers: tuple[str, ...] | None = None
    stages: tuple[int, ...]
    dtype: str
    gradient_accumulation_steps: tuple[int, ...]
    checks: dict[Check, CheckTolerance]


Alternative = Literal[
    "last_micro_batch",
    "first_and_last_micro_batch",
    "previous_step",
    "all_steps_so_far",
    "all_steps_so_far_unclipped",
    "step_count_plus_one",
    "without_experts",
    "own_rank_only",
    "masters_not_restored",
    "partitioned_as_empty",
    "bias_added_after_rounding",
    "unclipped",
    "none",
    "inf",
]
Factor = Literal["loss_scale", "1/loss_scale", "scale_before/scale_after"] | float


class Effect(Entry):
    """What a defect makes of one check: first `equals`, then `times`."""

    equals: Alternative | None = None
    times: Factor | None = None

    @model_validator(mode="after")
    def _says_something(self) -> Effect:
        if self.equals is None and self.times is None:
            raise ValueError("`equals`, `times` or both")
        return self


class Symptom(Entry):
    """The exact signature of a defect: effects on checks, or an exception that matches `raises`."""

    forward: Effect | None = None
    reported_norm: Effect | None = None
    gradient_used: Effect | None = None
    update: Effect | None = None
    ranks_agree: Effect | None = None
    loss_scale: Effect | None = None
    consistency: Effect | None = None
    raises: Regex | None = None
    steps: Annotated[str, Field(pattern=r"^(all|first|scale_raise|from:[1-9][0-9]*)$")] = "all"

    @property
    def effects(self) -> dict[Check, Effect]:
        """The effects by check, in the order of the checks."""
        found: dict[Check, Effect | None] = {check: getattr(self, check) for check in CHECKS}
        return {check: effect for check, effect in found.items() if effect is not None}

    @model_validator(mode="after")
    def _one_kind(self) -> Symptom:
        if bool(self.effects) == (self.raises is not None):
            raise ValueError("either effects on checks or `raises`")
        return self


class CorrectionMode(Entry):
    """One way in which a correction can be applied. raises: it stops with this message, at the user's own line."""

    raises: Regex | None = None


class Correction(Entry):
    """A correction of ci/corrections that has modes, the usual one first; the others need no entry."""

    about: str
    modes: Annotated[dict[Word, CorrectionMode], Field(min_length=1)]


class Defect(Entry):
    """A ledger entry: where a known defect shows, in which releases, and how exactly."""

    id: Word
    title: str
    upstream: tuple[str, ...]
    where: Where
    affects: dict[str, Specifier]
    symptom: Symptom
    tolerance: Annotated[float | None, Field(gt=0)] = None
    correction: Annotated[
        str | tuple[str, ...] | None, Field(description="a file of ci/corrections, or several that are right together")
    ] = None
    config: Annotated[
        dict[str, Any] | None, Field(description="keys of the DeepSpeed configuration that avoid the defect")
    ] = None
    advice: str

    @property
    def corrections(self) -> tuple[str, ...]:
        """The corrections that make it right together; none where there are none."""
        if self.correction is None:
            return ()
        return (self.correction,) if isinstance(self.correction, str) else self.correction

    @field_validator("affects")
    @classmethod
    def _bounded(cls, affects: dict[str, str]) -> dict[str, str]:
        if not affects:
            raise ValueError("at least one package with the releases affected")
        return affects


class Matrix(Entry):
    """All of matrix.yaml."""

    schema_version: Annotated[Literal[1], Field(alias="schema")]
    package_indexes: dict[Word, PackageIndex]
    cann: Annotated[
        dict[Word, tuple[ExactVersion, ...]], Field(description="torch-npu releases of each CANN, as published")
    ] = {}
    backends: dict[Word, Backend]
    runners: Annotated[dict[Word, Runner], Field(description="by backend")] = {}
    stacks: dict[Word, Stack]
    lanes: dict[Word, Lane]
    jobs: dict[Word, Job]
    tolerances: tuple[Tolerance, ...]
    corrections: dict[str, Correction] = {}
    defects: tuple[Defect, ...]

    def tolerances_for(self, job: str, case: Mapping[str, Scalar]) -> Mapping[Check, CheckTolerance]:
        """The tolerances of one case: those written for its job, and there for its trainer, first; else none.

        A job without accumulation counts as accumulation 1. One that was not measured (a user's own configuration)
        has the tolerances of the nearest larger one that was, else of the largest.
        """
        stage, dtype, trainer = case.get("zero_stage", 0), case.get("dtype"), case.get("trainer")
        fitting = (group for group in self.tolerances if stage in group.stages and group.dtype == dtype)
        groups = [
            group
            for group in fitting
            if group.job in (None, job) and (group.trainers is None or trainer in group.trainers)
        ]
        groups.sort(key=lambda group: (group.job is not None, group.trainers is not None))
        measured = sorted({steps for group in groups for steps in group.gradient_accumulation_steps})
        asked = int(case.get("gradient_accumulation_steps", 1))
        accumulation = next((steps for steps in measured if steps >= asked), max(measured, default=asked))
        found: dict[Check, CheckTolerance] = {}
        for group in groups:
            if accumulation in group.gradient_accumulation_steps:
                found |= group.checks
        return found
