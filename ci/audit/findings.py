"""What is odd about one log, or about two beside each other: pure functions of their summaries.

A finding says what was seen and with what numbers. Which defect it may be is for the ledger (`ci.audit.known`), to
which a finding hands a `Signature`: what an entry's symptom must say to explain it.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

from ci.audit.fold import EXACT, SAME_NORM, Block, Comparison, Pair, Run, Values
from ci.entries import Alternative, Factor

ENOUGH = 8
"""Records below which nothing is said about the course of a run."""

FAR = 1000.0
"""Times the clip value from which on a norm needs no company to be odd."""

DEFAULT_CLIP = 1.0
"""max_grad_norm of transformers and of ms-swift where nobody sets it."""

INITIAL_POWER = 16
"""DeepSpeed's initial_scale_power: the loss scale starts at 2^16 and stays there in bf16."""

GROWS, RANKS = 2.0, 0.9
"""A norm grows where its end is this many times its beginning, and its rank correlation with the step is this high."""

SUM_OF_GRADIENTS = 0.4, 1.25
"""The norm of a sum of all gradients so far grows as the step to this power: 0.5 for noise, 1 for one direction."""


@dataclass(frozen=True)
class Signature:
    """What a ledger entry must say of the reported norm (any of these), or the message that it must expect."""

    times: tuple[Factor, ...] = ()
    equals: tuple[Alternative, ...] = ()
    raised: str | None = None


@dataclass(frozen=True)
class Finding:
    """One oddity. suspects: the logs that may be wrong, by position, and what an entry must say to explain that."""

    text: str
    suspects: tuple[tuple[int, Signature], ...] = ()


def of_run(run: Run, position: int, name: str, clip: float | None) -> Iterator[Finding]:
    """All findings about one log. clip: what gradients are clipped by, 0 for none; None: what the log says."""
    found = [
        *_not_finite(run.loss, "loss", name, position),
        *_not_finite(run.norm, "grad_norm", name, position),
        no_norm(run, name, position),
        zero_norm(run, name, position),
        growing(run, name, position),
        never_below(run, name, position, clip),
        scale_at_minimum(run, name, position),
    ]
    yield from (finding for finding in found if finding is not None)


def of_comparison(comparison: Comparison, names: tuple[str, str]) -> Iterator[Finding]:
    """All findings about two logs."""
    found = [power_of_two(comparison, names), equal_losses(comparison, names)]
    yield from (finding for finding in found if finding is not None)


def _not_finite(values: Values, what: str, name: str, position: int) -> Iterator[Finding]:
    for count, first, word in ((values.nan, values.first_nan, "nan"), (values.inf, values.first_inf, "inf")):
        if count:
            text = f"{name}: {what} is {word} in {count} of {values.count} records, first at step {first}"
            ledger = ((position, Signature(equals=("inf",))),) if (what, word) == ("grad_norm", "inf") else ()
            yield Finding(text, ledger)


def no_norm(run: Run, name: str, position: int) -> Finding | None:
    """Losses, and never a norm."""
    if not run.loss.count or run.norm.count:
        return None
    text = (
        f"{name}: none of {run.steps} records has a grad_norm (transformers writes one from 4.38, where there is one)"
    )
    return Finding(text, ((position, Signature(equals=("none",))),))


def zero_norm(run: Run, name: str, position: int) -> Finding | None:
    """A norm that is 0 in every record."""
    if run.norm.count < ENOUGH or run.norm.zero < run.norm.count:
        return None
    text = f"{name}: grad_norm is 0 in all {run.norm.count} records; in GRPO groups of equal rewards do that too"
    return Finding(text, ((position, Signature(times=(0.0,))),))


def growing(run: Run, name: str, position: int) -> Finding | None:
    """A norm that grows with the step, all the way."""
    course = run.course
    if sum(block.count for block in course) < ENOUGH or len(course) < ENOUGH:
        return None
    first, last = (math.exp(course[place].log_norm) for place in (0, -1))
    if last < GROWS * first or _rank_correlation(course) < RANKS:
        return None
    exponent = _exponent(course)
    text = f"{name}: grad_norm grows with the step, from {first:.6g} to {last:.6g}, as step^{exponent:.2f}"
    low, high = SUM_OF_GRADIENTS
    if not low <= exponent <= high:
        return Finding(text)
    text += "; a sum of the gradients of all steps so far would grow as step^0.5 to step^1"
    signature = Signature(equals=("all_steps_so_far", "all_steps_so_far_unclipped"))
    return Finding(text, ((position, signature),))


def never_below(run: Run, name: str, position: int, clip: float | None) -> Finding | None:
    """A clip that binds in every step: the usual sign, in one log alone, of a norm that is too large by a factor."""
    said = run.settings.get("gradient_clipping") if clip is None else clip
    limit = DEFAULT_CLIP if said is None else float(said)
    if not limit or not limit < run.norm.least < math.inf:
        return None
    if run.norm.count < ENOUGH and run.norm.least < FAR * limit:
        return None
    source = (
        "assumed: the trainers' own; --clip says otherwise" if said is None else "as given" if clip else "in the log"
    )
    text = (
        f"{name}: grad_norm is never below the clip value {limit:g} ({source}): the least of {run.norm.count} is"
        f" {run.norm.least:.6g}; divided by 2^{INITIAL_POWER} it would be {run.norm.least / 2**INITIAL_POWER:.3g}"
    )
    return Finding(text, ((position, Signature(times=("loss_scale",))),))


def scale_at_minimum(run: Run, name: str, position: int) -> Finding | None:
    """A dynamic loss scale that overflows have driven down to 1 or below: steps are skipped for good."""
    if not run.overflows or run.scales is None or run.scales[0] > 1:
        return None
    text = f"{name}: {run.overflows} overflows, and the loss scale has fallen to {run.scales[0]:g}: steps are skipped"
    signature = Signature(raised="Current loss scale already at minimum - cannot decrease scale anymore. Exiting run.")
    return Finding(text, ((position, signature),))


def power_of_two(comparison: Comparison, names: tuple[str, str]) -> Finding | None:
    """Norms apart by one power of two: in half of the steps, or in the first, from which on two runs drift apart."""
    first, power = comparison.first, _power(comparison)
    if first is None or not power:
        return None
    larger = 0 if power > 0 else 1
    high, low = (names[larger], names[1 - larger])
    power, norms = abs(power), _norms(first)[:: 1 if larger == 0 else -1]
    text = (
        f"norms apart by 2^{power}: {high} reports {norms[0] / norms[1]:.6g} times the norm of {low} at step"
        f" {first.number} ({norms[0]:.9g} and {norms[1]:.9g}); 2^{power} in"
        f" {comparison.exact[power if larger == 0 else -power]} of {comparison.with_norms} steps"
    )
    if power == INITIAL_POWER:
        text += f". 2^{power} is the loss scale that DeepSpeed starts with"
    else:
        text += ". A loss scale may be that, or a sum over micro-batches or ranks in one run where the other has a mean"
    suspects = (larger, Signature(times=("loss_scale",))), (1 - larger, Signature(times=("1/loss_scale",)))
    return Finding(text, suspects)


def equal_losses(comparison: Comparison, names: tuple[str, str]) -> Finding | None:
    """Equal losses say the same weights and data, and so the same gradient."""
    pair = comparison.first_unequal
    if pair is None:
        return None
    left, right = _norms(pair)
    text = (
        f"losses equal while norms differ: in {comparison.unequal_norms} of {comparison.equal_losses} steps with equal"
        f" losses the norms are more than {SAME_NORM:.0%} apart, first at step {pair.number}: loss {pair.left.loss:g},"
        f" grad_norm {left:.9g} in {names[0]} and {right:.9g} in {names[1]}"
    )
    if comparison.zero_losses == comparison.equal_losses:
        text += ". All those losses are 0, as in GRPO with one iteration, where they say little about the data"
    if _power(comparison):
        return Finding(text)
    signature = Signature(
        equals=("last_micro_batch", "first_and_last_micro_batch", "previous_step", "all_steps_so_far", "own_rank_only"),
    )
    return Finding(text, ((0, signature), (1, signature)))


def _power(comparison: Comparison) -> int:
    """The power of two that the norms are apart by, left over right; 0 for none."""
    if comparison.first is None:
        return 0
    commonest = max(comparison.exact, key=lambda power: comparison.exact[power], default=0)
    if commonest and 2 * comparison.exact[commonest] >= comparison.with_norms:
        return commonest
    left, right = _norms(comparison.first)
    distance = math.log2(left) - math.log2(right)
    power = round(distance)
    near = sum(comparison.nearest.get(power + more, 0) for more in (-1, 0, 1))
    return power if abs(distance - power) <= EXACT and 2 * near >= comparison.with_norms else 0


def _norms(pair: Pair) -> tuple[float, float]:
    return pair.left.grad_norm or math.nan, pair.right.grad_norm or math.nan


def _rank_correlation(course: tuple[Block, ...]) -> float:
    """Spearman's: 1 where each block's mean norm is above that of the block before, around 0 without a trend."""
    count = len(course)
    ranks = sorted(range(count), key=lambda place: course[place].log_norm)
    return 1 - 6 * sum((place - rank) ** 2 for rank, place in enumerate(ranks)) / (count * (count**2 - 1))


def _exponent(course: tuple[Block, ...]) -> float:
    """The slope of log(norm) over log(number of the record), by least squares."""
    across = [math.log(block.number) for block in course]
    up = [block.log_norm for block in course]
    middle, height = (sum(values) / len(course) for values in (across, up))
    spread = sum((each - middle) ** 2 for each in across)
    return sum((x - middle) * (y - height) for x, y in zip(across, up, strict=True)) / spread
