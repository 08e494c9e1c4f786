"""Cases: how a pattern becomes cases, how a case is named, and what `--case` and `where` match.

A cell id is an address in reports and issues, so the rules that write it live here alone and never change silently.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping

from ci.entries import CASE_KEYS, NEGATION, CaseKey, Job, Scalar, Where, canonical, same
from ci.errors import UsageError, choices

Case = Mapping[str, Scalar]

PREFIXES: Mapping[str, str] = {
    "zero_stage": "zero",
    "gradient_accumulation_steps": "gas",
    "gradient_clipping": "clip-",
    "world_size": "ws",
    "loss_scale": "scale-",
    "checkpointing": "ckpt-",
    "init": "init-",
    "num_iterations": "iter",
    "beta": "beta",
    "lora_b": "b-",
    "offload": "offload-",
    "grad_accum_dtype": "accum-",
    "backward_calls": "backward",
    "parameters": "params-",
    "param_groups": "groups",
    "weight_decay": "decay",
    "steps": "steps",
}
"""What stands before a value in a cell id; keys not named here are written as the value alone."""


def text(value: Scalar) -> str:
    """A value as `--case` and the ids write it."""
    if isinstance(value, bool):
        return "true" if value else "false"
    return f"{value:.12g}" if isinstance(value, float) else str(value)


def part(key: str, value: Scalar) -> str:
    """One value in a cell id."""
    if isinstance(value, bool):
        return key if value else f"no-{key}"
    return f"{PREFIXES.get(key, '')}{text(value)}"


def default(key: CaseKey, earlier: Case) -> Scalar | None:
    """The default of a key, given the keys before it."""
    for conditional in key.default_when:
        if matches(conditional.where, earlier):
            return conditional.value
    return key.default


def resolve(job: Job, given: Case) -> dict[str, Scalar]:
    """All keys of the job in the contract's order. A key that has no default and is not given raises KeyError."""
    case: dict[str, Scalar] = {}
    for name in job.ordered_keys:
        value = given[name] if name in given else default(job.keys[name], case)
        if value is None:
            raise KeyError(name)
        case[name] = value
    return case


def shown(job: Job, case: Case) -> tuple[str, ...]:
    """The keys that a cell id writes: those that are not at the job's default."""
    keys = []
    for name in job.ordered_keys:
        usual = default(job.keys[name], case)
        if usual is None or not same(usual, case[name]):
            keys.append(name)
    return tuple(keys)


def name(job: Job, case: Case) -> str:
    """The last part of a cell id."""
    return "-".join(part(key, case[key]) for key in shown(job, case))


def expand(pattern: Where) -> Iterator[dict[str, Scalar]]:
    """The product of a pattern's lists, in the contract's order of keys."""
    keys = [key for key in CASE_KEYS if key in pattern]
    lists = [value if isinstance(value, tuple) else (value,) for value in (pattern[key] for key in keys)]
    for values in itertools.product(*lists):
        yield dict(zip(keys, values, strict=True))


def matches(where: Where, case: Case) -> bool:
    """Whether every key of `where` holds; a key that the case does not have never matches."""
    return all(key in case and _holds(wanted, case[key]) for key, wanted in where.items())


def _holds(wanted: Scalar | tuple[Scalar, ...], value: Scalar) -> bool:
    if isinstance(wanted, tuple):
        return any(_holds(each, value) for each in wanted)
    if isinstance(wanted, str) and wanted.startswith(NEGATION):
        return text(value) != wanted.removeprefix(NEGATION)
    return same(wanted, value)


def parse_value(key: CaseKey, word: str) -> Scalar | None:
    """The value that a word on the command line stands for, or None where the key has no such value."""
    candidates: list[Scalar] = [word]
    if word in ("true", "false"):
        candidates.insert(0, word == "true")
    for kind in (int, float):
        try:
            candidates.insert(0, canonical(kind(word)))
        except ValueError:
            continue
    return next((value for value in candidates if key.accepts(value)), None)


def parse_filter(words: str, jobs: Mapping[str, Job]) -> dict[str, dict[str, Scalar]]:
    """`k=v,k=v` -> for each job that has all the keys and values, the values wanted; UsageError if none has."""
    pairs: dict[str, str] = {}
    for word in words.split(","):
        key, equals, value = word.strip().partition("=")
        if not equals or not key or not value:
            raise UsageError(f"--case {words}: found {word.strip()!r}; expected key=value[,key=value]")
        if key in pairs:
            raise UsageError(f"--case {words}: {key} is given twice; repeat --case to ask for either value")
        pairs[key] = value
    wanted: dict[str, dict[str, Scalar]] = {}
    for key, word in pairs.items():
        having = [job for job in jobs.values() if key in job.keys]
        if not having:
            known = {name for job in jobs.values() for name in job.keys}
            raise UsageError(f"--case {words}: unknown case key {key!r}; {choices(key, known)}")
        if all(parse_value(job.keys[key], word) is None for job in having):
            allowed = {text(value) for job in having for value in job.keys[key].allowed}
            raise UsageError(f"--case {words}: unknown value {word!r} of {key}; {choices(word, allowed)}")
    for job_id, job in jobs.items():
        values = {key: parse_value(job.keys[key], word) for key, word in pairs.items() if key in job.keys}
        if len(values) == len(pairs) and None not in values.values():
            wanted[job_id] = {key: value for key, value in values.items() if value is not None}
    if not wanted:
        raise UsageError(f"--case {words}: no job has all of these; the jobs asked for: {', '.join(jobs)}")
    return wanted
