"""Evidence made up from a list of known defects: what a case would have recorded if exactly those were at work.

It is written with the jobs' own dataclasses and read back by the host, so that every judge test crosses the contract.
Gradients are three small tensors drawn from the step and the alternative's name; nothing here calls the judge.
"""

from __future__ import annotations

import math
import random
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from ci.evidence import Evidence, parse_line
from ci.matrix import Backend, CheckTolerance, Defect, Effect, Matrix, Scalar, Tolerance
from ci.plan import Cell
from tests.jobs import evidence as jobs

TENSORS = {"first.weight": 6, "second.weight": 4, "second.bias": 2}
TOLERANCE = 1e-3
RESUMED = 2
"""The first step after a checkpoint, counted from 0."""
Vectors = dict[str, list[float]]


def cell_of(job: str, case: Mapping[str, Scalar], stack: str = "made-up", gated: str | None = None) -> Cell:
    words = "-".join(f"{key}={value}" for key, value in case.items())
    command = f"nox -s cpu-zero -- --stack {stack} --job {job} --case {words}"
    return Cell(f"cpu/{stack}/{job}/{words}", "cpu", stack, job, case, 2, 60, gated, command)


def cell(job: str = "grpo-lora", stack: str = "made-up", gated: str | None = None, **case: Scalar) -> Cell:
    return cell_of(job, case, stack, gated)


def matrix(defects: Iterable[Defect] = (), tolerance: float = TOLERANCE) -> Matrix:
    """A matrix with the ledger given and one tolerance for everything; what the judge does not read is left empty."""
    allowed = CheckTolerance(tolerance=tolerance, largest=tolerance / 4, repeats=30)
    return Matrix.model_construct(
        schema_version=1,
        package_indexes={},
        backends={"cpu": Backend(accelerator="cpu", communication="gloo", start_method="forkserver")},
        stacks={},
        lanes={},
        jobs={},
        tolerances=tuple(
            Tolerance(
                stages=(0, 1, 2, 3),
                dtype=dtype,
                gradient_accumulation_steps=(1, 4),
                checks={"forward": allowed, "reported_norm": allowed, "gradient_used": allowed},
            )
            for dtype in ("bf16", "fp16", "fp32")
        ),
        defects=tuple(defects),
    )


@dataclass(frozen=True)
class Faults:
    """How a made-up case differs from a clean one.

    moved: {check: relative shift} applied on top of the defects, to every step. clip: gradient clipping, None unset.
    raises: the message of the exception that ends the case, after the first forward pass. resumes: a fresh engine goes
    on from a checkpoint after two steps: it holds no gradient of before, and may lack what was saved.
    """

    defects: Sequence[Defect] = ()
    moved: Mapping[str, float] = field(default_factory=dict)
    clip: float | None = None
    dynamic: bool = False
    raises: str | None = None
    steps: int = 3
    resumes: bool = False

    def exists(self, alternative: str | None, position: int) -> bool:
        """Whether the reference would record this alternative in this step of a case that resumes."""
        if not self.resumes:
            return True
        if alternative == "masters_not_restored":
            return position == RESUMED
        return position != RESUMED or not (alternative or "").startswith("all_steps_so_far")


def _norm(vectors: Vectors) -> float:
    return math.sqrt(sum(value * value for vector in vectors.values() for value in vector))


def _scaled(vectors: Vectors, factor: float) -> Vectors:
    return {name: [factor * value for value in vector] for name, vector in vectors.items()}


def _drawn(step: int, alternative: str) -> Vectors:
    draw = random.Random(f"{step}/{alternative}")
    return {name: [draw.uniform(-1, 1) for _ in range(size)] for name, size in TENSORS.items()}


def _gram(used: Vectors, wanted: Vectors) -> dict[str, jobs.Gram]:
    return {
        name: jobs.Gram(
            gg=sum(g * g for g in used[name]),
            gr=sum(g * r for g, r in zip(used[name], wanted[name], strict=True)),
            rr=sum(r * r for r in wanted[name]),
        )
        for name in used
    }


def _clipped(vectors: Vectors, clip: float | None) -> Vectors:
    return vectors if clip is None else _scaled(vectors, min(1.0, clip / (_norm(vectors) + 1e-6)))


def _factor(effects: Iterable[Effect], before: float, after: float) -> float:
    named = {"loss_scale": before, "1/loss_scale": 1 / before, "scale_before/scale_after": before / after}
    product = 1.0
    for effect in effects:
        if effect.times is not None:
            product *= named[effect.times] if isinstance(effect.times, str) else effect.times
    return product


def _equals(effects: Iterable[Effect]) -> str:
    return next((effect.equals for effect in effects if effect.equals is not None), "truth")


def _shows(defect: Defect, position: int, raised: bool) -> bool:
    when = defect.symptom.steps
    if when == "scale_raise":
        return raised
    if when == "first":
        return position == 0
    return position + 1 >= int(when.removeprefix("from:")) if when.startswith("from:") else True


def _moved(value: float, faults: Faults, check: str) -> float:
    """Moved by a share of itself, and off zero by that share of one."""
    by = faults.moved.get(check, 0.0)
    return value * (1 + by) if value else by


def _left(effects: Iterable[Effect], alternative: str, faults: Faults) -> tuple[str, ...]:
    explained = _equals(effects) == alternative and "consistency" not in faults.moved
    return () if explained else ("not as it must be",)


def step(position: int, faults: Faults) -> jobs.Step:
    """One step, with every alternative recorded."""
    raised = faults.dynamic and position % 2 == 1
    before = 4.0 if faults.dynamic else 65536.0
    after = 2 * before if raised else before
    shown = [defect for defect in faults.defects if _shows(defect, position, raised)]
    effects = {
        check: [
            defect.symptom.effects[check]
            for defect in shown
            if check in defect.symptom.effects and faults.exists(defect.symptom.effects[check].equals, position)
        ]
        for check in jobs.CHECKS
    }
    truth = _drawn(position, "truth")
    wanted = {name: _clipped(_drawn(position, name), faults.clip) for name in jobs.ALTERNATIVES}
    norms = {name: _norm(_drawn(position, name)) for name in jobs.ALTERNATIVES}
    wanted |= {"truth": _clipped(truth, faults.clip), "unclipped": truth}
    norms |= {"truth": _norm(truth), "unclipped": _norm(truth)}

    base = _equals(effects["reported_norm"])
    reported: float | None
    if base == "none":
        reported = norms["truth"] if "reported_norm" in faults.moved else None
    elif base == "inf":
        reported = norms["truth"] if "reported_norm" in faults.moved else math.inf
    else:
        reported = norms[base] * _factor(effects["reported_norm"], before, after)
    if reported is not None:
        reported = _moved(reported, faults, "reported_norm")
    factor = _moved(_factor(effects["gradient_used"], before, after), faults, "gradient_used")
    used = _scaled(wanted[_equals(effects["gradient_used"])], factor)
    errors = {}
    for name in used:
        difference = math.dist(used[name], wanted["truth"][name])
        whole = _norm(wanted["truth"]) / math.sqrt(len(used))
        errors[name] = difference / max(math.hypot(*wanted["truth"][name]), whole)
    far = {check: 1.0 if effects[check] else 0.0 for check in ("forward", "update")}
    shift = {check: faults.moved.get(check, 0.0) for check in ("forward", "update")}
    return jobs.Step(
        index=position,
        loss=0.5,
        loss_error=far["forward"] + shift["forward"],
        logprob_error=far["forward"] + shift["forward"],
        lr=1.0,
        loss_scale_before=before,
        loss_scale_after=after,
        loss_scale_expected=after,
        grad_norm_reported=(reported, reported),
        grad_norm_true=norms["truth"],
        grad_norm_used=_norm(used),
        grad_norm_wanted=_norm(wanted["truth"]),
        gradient_error=max(errors.values()),
        update_error=far["update"] + shift["update"],
        consistency=("not as it must be",) if effects["consistency"] or "consistency" in faults.moved else (),
        tensors=tuple(jobs.TensorError(name, error) for name, error in errors.items()),
        alternatives={
            name: jobs.Alternative(
                reported_norm=norms[name],
                gradient=_gram(used, wanted[name]),
                forward_error=shift["forward"] if _equals(effects["forward"]) == name else 1.0,
                update_error=shift["update"] if _equals(effects["update"]) == name else 1.0,
                consistency=None if name == "truth" else _left(effects["consistency"], name, faults),
            )
            for name in (*jobs.ALTERNATIVES, "truth")
            if faults.exists(name, position)
        },
    )


def _cut_short(whole: jobs.Step) -> jobs.Step:
    """A step that an exception ended after its forward pass."""
    reason = "an exception ended the step after its forward pass"
    return jobs.Step(
        index=whole.index,
        loss=whole.loss,
        loss_error=whole.loss_error,
        logprob_error=whole.logprob_error,
        not_judged=dict.fromkeys((check for check in jobs.CHECKS if check != "forward"), reason),
        alternatives={
            name: jobs.Alternative(forward_error=alternative.forward_error)
            for name, alternative in whole.alternatives.items()
        },
    )


def recorded(wanted: Cell, deepspeed: str, faults: Faults | None = None) -> jobs.Evidence:
    """What the job would have written for this cell."""
    faults = faults or Faults()
    exception = None if faults.raises is None else jobs.ExceptionRecord("RuntimeError", faults.raises, where="backward")
    return jobs.Evidence(
        cell=wanted.id,
        pins={"deepspeed": deepspeed, "torch": "2.13.0+cpu"},
        accelerator="cpu",
        device="cpu",
        world_size=wanted.world_size,
        steps=(_cut_short(step(0, faults)),) if faults.raises else tuple(step(n, faults) for n in range(faults.steps)),
        exception=exception,
    )


def read(record: jobs.Evidence) -> Evidence:
    """As the host reads it."""
    return parse_line(jobs.to_json(record), "made-up:1")


def evidence(wanted: Cell, deepspeed: str = "0.19.8", faults: Faults | None = None) -> Evidence:
    return read(recorded(wanted, deepspeed, faults))
