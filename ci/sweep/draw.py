"""Which configurations the sweep tries: first a covering array, then random ones, the same for the same seed.

Defects of a configuration space are nearly always about one value or two that meet, so every pair of values that can
meet is tried before anything is drawn at random.
"""

from __future__ import annotations

import functools
import itertools
import random
from collections.abc import Iterator, Mapping

from ci import cases
from ci.cases import Case
from ci.entries import Job, Scalar, same

OPEN_VALUES: Mapping[str, tuple[Scalar, ...]] = {
    "gradient_accumulation_steps": (1, 2, 4),
    "gradient_clipping": ("unset", 0, "loose", "binding"),
    "world_size": (2, 1, 3, 4),
    "backward_calls": (1, 2),
    "weight_decay": (0, 0.1),
    "steps": (3, 5),
}
"""What is drawn for keys whose values are any number; the default first."""
SIMPLEST_FIRST: Mapping[str, tuple[Scalar, ...]] = {
    **OPEN_VALUES,
    "dtype": ("fp32", "bf16", "fp16"),
    "zero_stage": (0, 1, 2, 3),
}
"""Keys that have more than one step towards the simplest."""
CANDIDATES = 8
"""Cases made for each pair that is left; the one that covers most is kept."""
TRIES = 20
"""Dead ends until a pair counts as one that no case can have."""

Pair = tuple[tuple[str, Scalar], tuple[str, Scalar]]


def domain(job: Job) -> dict[str, tuple[Scalar, ...]]:
    """The values drawn for each key, in the order of the contract."""
    return {name: OPEN_VALUES.get(name) or tuple(job.keys[name].allowed) for name in job.ordered_keys}


def allowed(job: Job, case: Case) -> bool:
    """Whether the job has no exclusion for the keys given so far."""
    return not any(cases.matches(exclusion.where, case) for exclusion in job.exclude)


def complete(job: Job, fixed: Case, rng: random.Random) -> dict[str, Scalar] | None:
    """A random case with the values fixed; None where no completion was found."""
    values = domain(job)
    about = {name: [each.where for each in job.exclude if name in each.where] for name in job.ordered_keys}
    for _ in range(TRIES):
        case = dict(fixed)
        for name in rng.sample(job.ordered_keys, len(job.ordered_keys)):
            if name in case:
                continue
            fitting = [
                value
                for value in values[name]
                if not any(cases.matches(where, {**case, name: value}) for where in about[name])
            ]
            if not fitting:
                break
            case[name] = rng.choice(fitting)
        else:
            return {name: case[name] for name in job.ordered_keys} if allowed(job, case) else None
    return None


def pairs(case: Case) -> set[Pair]:
    """Every pair of values that meets in a case."""
    return set(itertools.combinations(case.items(), 2))


def covering(job: Job, rng: random.Random) -> list[dict[str, Scalar]]:
    """Cases in which every pair of values meets at least once, but for pairs that no case can have."""
    values = domain(job)
    left = [
        ((one, value), (other, another))
        for one, other in itertools.combinations(job.ordered_keys, 2)
        for value in values[one]
        for another in values[other]
    ]
    rng.shuffle(left)
    waiting = dict.fromkeys(left)
    found = []
    while waiting:
        pair = next(iter(waiting))
        made = [complete(job, dict(pair), rng) for _ in range(CANDIDATES)]
        best = max(
            (case for case in made if case is not None),
            key=lambda case: len(pairs(case) & waiting.keys()),
            default=None,
        )
        if best is None:
            del waiting[pair]
            continue
        for met in pairs(best):
            waiting.pop(met, None)
        found.append(best)
    return found


def draws(job: Job, seed: int) -> Iterator[dict[str, Scalar]]:
    """Cases without end, each once: the covering array, then random ones."""
    rng = random.Random(seed)  # reason: a fixed seed is the point here
    seen = set()

    def stream() -> Iterator[dict[str, Scalar]]:
        yield from covering(job, rng)
        while True:
            case = complete(job, {}, rng)
            if case is not None:
                yield case

    for case in stream():
        name = cases.name(job, case)
        if name not in seen:
            seen.add(name)
            yield case


def simpler(job: Job, case: Case) -> list[dict[str, Scalar]]:
    """The case with one key simpler, every key in turn: at its default, or at a value that comes before its own.

    A key that the simpler value forbids goes to its default as well.
    """
    found = []
    for name in job.ordered_keys:
        usual = cases.default(job.keys[name], case)
        if usual is not None and same(usual, case[name]):
            continue
        before = list(itertools.takewhile(functools.partial(_differs, case[name]), SIMPLEST_FIRST.get(name, ())))
        for value in before if usual is None else [usual, *(v for v in before if not same(v, usual))]:
            changed = fitted(job, case, {name: value})
            if changed is not None and changed not in found:
                found.append(changed)
    return found


def _differs(value: Scalar, other: Scalar) -> bool:
    return not same(value, other)


def fitted(job: Job, case: Case, changes: Case) -> dict[str, Scalar] | None:
    """The case with these changes; where that is excluded, with one more key at its default; None if nothing fits."""
    whole = cases.resolve(job, {**case, **changes})
    if allowed(job, whole):
        return whole
    for name in job.ordered_keys:
        if name in changes:
            continue
        given = {key: value for key, value in case.items() if key != name}
        try:
            whole = cases.resolve(job, {**given, **changes})
        except KeyError:
            continue
        if allowed(job, whole):
            return whole
    return None


def changed(before: Case, after: Case) -> dict[str, Scalar]:
    """The keys whose values differ, as they are after."""
    return {name: value for name, value in after.items() if not same(value, before[name])}
