"""The reference: every optimizer step computed again by plain PyTorch in one process, and the engine's error in it.

Teacher-forced: each step starts from the case's own measured fp32 masters (the first from the seeded weights, so that
faults at initialisation are seen), casts them to the case's dtype, runs the forward in that dtype and accumulates
gradients in fp32. It takes the seed, the masters, the moments, the dtypes in which the engine holds what it computes
with, and the recorded micro-batches; it reads no gradient, norm, learning rate or step count of the engine, except the
used gradient in the update check and the loss scale in fp16. It records what known defects would make of the step
(`Alternative`) as it goes. It judges nothing.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence

import torch

from tests.jobs import loss_scaling, plain_optimizer, shims
from tests.jobs.evidence import CHECKS, Alternative, Gram, Step, TensorError
from tests.jobs.plain_optimizer import OptimizerSettings
from tests.jobs.recorder import MicroBatch, RankRecord, StepRecord
from tests.jobs.workload import DTYPES, Workload, seed_weights

Tensors = dict[str, torch.Tensor]
CLIP_EPSILON = 1e-6
NOT_RESTORED = "its master is not restored by the checkpoint"
"""What a job says of a master that is not what was saved, after the parameter's name and a colon."""
UNFINISHED = "an exception ended the step after its forward pass"
WORST = 10


@dataclasses.dataclass(frozen=True)
class Gradients:
    """Gradients of one optimizer step, fp32 by parameter name; None where no micro-batch gave one.

    mean: over ranks and micro-batches. first, last: what the first and the last micro-batch of each rank alone
    contribute to it.
    loss: mean loss. loss_error, logprob_error: see Step. clip_share: share of tokens at which the ratio clip bound.
    has_logprobs: whether the loss of this workload has log-probabilities to compare.
    """

    mean: dict[str, torch.Tensor | None]
    first: dict[str, torch.Tensor | None]
    last: dict[str, torch.Tensor | None]
    loss: float
    loss_error: float
    logprob_error: float | None
    clip_share: float = 0.0
    has_logprobs: bool = False


def norm(tensors: Mapping[str, torch.Tensor | None]) -> float:
    """Global L2 norm in fp64; a None counts as zeros."""
    return math.sqrt(sum(float(t.double().pow(2).sum()) for t in tensors.values() if t is not None))


def clip_coefficient(true_norm: float, clip: float | None) -> float:
    """What the gradient is multiplied by: min(1, clip / (norm + 1e-6)), and 1 where clipping is unset or 0."""
    if not clip or not math.isfinite(true_norm):
        return 1.0
    return min(1.0, clip / (true_norm + CLIP_EPSILON))


def scaled(tensors: Mapping[str, torch.Tensor | None], factor: float) -> dict[str, torch.Tensor | None]:
    """Every tensor times a factor."""
    return {name: None if t is None else t * factor for name, t in tensors.items()}


def gradients(
    model: torch.nn.Module,
    workload: Workload,
    micro_batches: Sequence[Sequence[MicroBatch]],
    scale: float = 1.0,
) -> Gradients:
    """Gradients of the model's trainable parameters for recorded micro-batches, [rank][index].

    The model holds the step's weights in the case's dtype. scale: the loss scale of fp16, divided out in fp32 again.
    """
    names = [name for name, parameter in model.named_parameters() if parameter.requires_grad]
    parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
    total: dict[str, torch.Tensor | None] = dict.fromkeys(names)
    first: dict[str, torch.Tensor | None] = dict.fromkeys(names)
    last: dict[str, torch.Tensor | None] = dict.fromkeys(names)
    count = sum(len(batches) for batches in micro_batches)
    loss_sum = loss_error = clip_share = 0.0
    logprob_error: float | None = None
    has_logprobs = False
    for batches in micro_batches:
        for index, batch in enumerate(batches):
            loss, logprobs = workload.loss(model, batch.inputs)
            value = float(loss.detach())
            loss_sum += value / count
            loss_error = worst(loss_error, _distance(batch.loss, value))
            logprob_error = _worse(logprob_error, batch, logprobs)
            if logprobs is not None:
                has_logprobs = True
                clip_share = max(clip_share, workload.clip_share(logprobs.detach(), batch.inputs))
            found = torch.autograd.grad(loss * scale, parameters, allow_unused=True)
            for name, gradient in zip(names, found, strict=True):
                if gradient is None:
                    continue
                part = gradient.detach().float() / (scale * count)
                total[name] = _sum(total[name], part)
                if index == 0:
                    first[name] = _sum(first[name], part)
                if index == len(batches) - 1:
                    last[name] = _sum(last[name], part)
    return Gradients(total, first, last, loss_sum, loss_error, logprob_error, clip_share, has_logprobs)


def _sum(held: torch.Tensor | None, more: torch.Tensor | None) -> torch.Tensor | None:
    return more if held is None else held if more is None else held + more


def losses(
    model: torch.nn.Module, workload: Workload, micro_batches: Sequence[Sequence[MicroBatch]]
) -> tuple[float, float, float | None]:
    """(mean loss, loss error, log-probability error) of recorded micro-batches, without gradients; see Step."""
    count = sum(len(batches) for batches in micro_batches)
    mean = loss_error = 0.0
    logprob_error: float | None = None
    for batch in (batch for batches in micro_batches for batch in batches):
        with torch.no_grad():
            loss, logprobs = workload.loss(model, batch.inputs)
        mean += float(loss) / count
        loss_error = worst(loss_error, _distance(batch.loss, float(loss)))
        logprob_error = _worse(logprob_error, batch, logprobs)
    return mean, loss_error, logprob_error


def _worse(known: float | None, batch: MicroBatch, logprobs: torch.Tensor | None) -> float | None:
    """The larger of the log-probability error known so far and that of this micro-batch."""
    if logprobs is None or batch.logprobs is None:
        return known
    mask = batch.inputs["completion_mask"].bool()
    return worst(known, _largest((batch.logprobs - logprobs.detach().float())[mask], logprobs[mask]))


def worst(*errors: float | None) -> float:
    """The largest error; nan is larger than any number (Python's max would drop it), None counts as absent."""
    known = [error for error in errors if error is not None]
    return math.nan if any(math.isnan(error) for error in known) else max(known, default=0.0)


def _distance(measured: float, expected: float) -> float:
    return abs(measured - expected) / max(1.0, abs(expected)) if math.isfinite(measured) else math.inf


def _largest(difference: torch.Tensor, expected: torch.Tensor) -> float:
    return float((difference.abs() / expected.detach().float().abs().clamp(min=1.0)).max())


def model_at(
    workload: Workload, masters: Tensors | None, dtypes: Mapping[str, torch.dtype] | None = None
) -> torch.nn.Module:
    """The plain model in the case's dtype with these masters cast into it; the seeded weights where there are none.

    dtypes: in which the engine holds each buffer and trainable parameter. Buffers are cast from fp32 to that: up to
    0.18 DeepSpeed casts the rotary frequencies to the training dtype, 0.19.8 leaves them in fp32. A parameter has the
    case's dtype, but where the workload says that a wider one may be right: PEFT makes LoRA's matrices fp32, which
    ZeRO-0 to -2 cast to the training dtype, and ZeRO-3 does not where the model is built in it.
    """
    model = workload.build()
    seed_weights(model, workload)
    if masters is not None:
        load(model, masters)
    dtype, held = DTYPES[workload.case["dtype"]], dtypes or {}
    for name, parameter in model.named_parameters():
        wider = workload.may_be_wider() and torch.promote_types(held.get(name, dtype), dtype) != dtype
        parameter.data = parameter.data.to(held[name] if wider else dtype)
    for name, buffer in model.named_buffers():
        buffer.data = buffer.data.to(held.get(name, buffer.dtype))
    model.train()
    return model


def load(model: torch.nn.Module, masters: Tensors) -> None:
    """Cast these masters into the model's parameters in place; parameters of other names keep their weights."""
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name in masters:
                parameter.copy_(masters[name].view_as(parameter))


def first_norm(workload: Workload, world_size: int, accumulation: int) -> float:
    """True gradient norm of the first optimizer step from the seeded weights: what clipping variants refer to."""
    model = model_at(workload, None)
    batches = [
        [MicroBatch(workload.micro_batch(rank, 0, index), 0.0, None) for index in range(accumulation)]
        for rank in range(world_size)
    ]
    with shims.plain_linear():
        return norm(gradients(model, workload, batches, _first_scale(workload)).mean)


def _first_scale(workload: Workload) -> float:
    return 1024.0 if workload.case["dtype"] == "fp16" else 1.0


def assembled(
    records: Sequence[StepRecord], shapes: Mapping[str, tuple[int, ...]], attribute: str
) -> tuple[Tensors, set[str], list[str]]:
    """(full fp32 tensors by name, names of which some elements are missing, names on which ranks differ bitwise).

    attribute: "master_before", "master_after", "used", or with a moment's name behind a dot "moments" (as handed) or
    "state_after"; missing elements are 0.
    """
    field, _, moment = attribute.partition(".")
    full = {name: torch.zeros(math.prod(shape)) for name, shape in shapes.items()}
    seen = {name: torch.zeros(math.prod(shape), dtype=torch.bool) for name, shape in shapes.items()}
    differing = set()
    for record in records:
        for piece in record.pieces:
            value = getattr(piece, field)
            if moment:
                value = value.get(moment)
            if value is None:
                continue
            span = slice(piece.start, piece.start + value.numel())
            known = seen[piece.name][span]
            if not torch.equal(full[piece.name][span][known], value[known]):
                differing.add(piece.name)
            full[piece.name][span] = value
            seen[piece.name][span] = True
    missing = {name for name, mask in seen.items() if not bool(mask.all())}
    return {name: value.view(shapes[name]) for name, value in full.items()}, missing, sorted(differing)


def steps(workload: Workload, ranks: Sequence[RankRecord], clip: float | None) -> Iterator[Step]:
    """Evidence of every optimizer step that all ranks recorded. clip: the clip value, None where unset."""
    with shims.plain_linear():
        yield from _Referee(workload, ranks, clip).steps()


@dataclasses.dataclass(frozen=True)
class _States:
    """The optimizer's moments of one step, each by parameter name: as it was handed them and as it left them."""

    before: Mapping[str, Tensors]
    after: Mapping[str, Tensors]


def _excess(measured: torch.Tensor, expected: torch.Tensor) -> float:
    """The largest distance beyond one unit in the last place of what is expected."""
    ulp = torch.nextafter(expected.abs(), torch.tensor(math.inf)) - expected.abs()
    return float(((measured - expected).abs() - ulp).clamp(min=0).max())


def _share(excess: float, largest: float) -> float:
    return excess / largest if largest else (math.inf if excess else 0.0)


class _Referee:
    """Walks the steps in order; holds what an alternative needs of earlier steps."""

    def __init__(self, workload: Workload, ranks: Sequence[RankRecord], clip: float | None) -> None:
        self.workload = workload
        self.ranks = ranks
        self.clip = clip
        self.shapes = ranks[0].shapes
        self.dtype = DTYPES[workload.case["dtype"]]
        self.all_so_far: dict[str, torch.Tensor | None] = {}
        self.previous: dict[str, torch.Tensor | None] = {}
        self.saved: Tensors = {}
        self.overflows: list[bool] = []
        self.scales: list[tuple[float | None, float | None]] = []
        self.clip_share = 0.0
        self.model = model_at(workload, None, ranks[0].dtypes)

    def steps(self) -> Iterator[Step]:
        complete = min(len(rank.steps) for rank in self.ranks)
        for index in range(complete):
            yield self._step(index, [rank.steps[index] for rank in self.ranks])
        begun = min(len(rank.unfinished) for rank in self.ranks)
        if begun and all(len(rank.steps) == complete for rank in self.ranks):
            yield self._unfinished(complete, [rank.unfinished[:begun] for rank in self.ranks])

    def _unfinished(self, index: int, batches: Sequence[Sequence[MicroBatch]]) -> Step:
        """The forward passes of a step that an exception ended later on; nothing else of it exists."""
        if index:
            masters, _, _ = assembled([rank.steps[-1] for rank in self.ranks], self.shapes, "master_after")
            load(self.model, masters)
        loss, loss_error, logprob_error = losses(self.model, self.workload, batches)
        alternatives = {}
        for name, workload in self.workload.alternatives().items():
            _, error, other = losses(self.model, workload, batches)
            alternatives[name] = Alternative(forward_error=worst(error, other))
        return Step(
            index=index,
            loss=loss,
            loss_error=loss_error,
            logprob_error=logprob_error,
            lr=self.workload.settings_at(index).lr,
            not_judged=dict.fromkeys((check for check in CHECKS if check != "forward"), UNFINISHED),
            alternatives={"truth": Alternative(forward_error=worst(loss_error, logprob_error)), **alternatives},
        )

    def _step(self, index: int, records: Sequence[StepRecord]) -> Step:
        violations = sorted({violation for record in records for violation in record.violations})
        before, lacking, differing = assembled(records, self.shapes, "master_before")
        violations += [f"{name}: no master holds all of it" for name in sorted(lacking)]
        violations += [f"{name}: ranks hold different masters" for name in differing]
        model = self.model
        resumed = index == self.workload.resumes_after()
        if resumed:  # a fresh engine remembers no gradient
            self.all_so_far, self.previous = {}, {}
        if index:
            load(model, before)
        initial = self._initial(model, before, steps_taken=0) if index == 0 else []
        violations += initial
        fp16 = self.workload.case["dtype"] == "fp16"
        scale_before = records[0].loss_scale_before
        batches = [record.micro_batches for record in records]
        scale = (scale_before or 1.0) if fp16 else 1.0
        truth = gradients(model, self.workload, batches, scale)
        wanted_batches = self.workload.micro_batches()
        if any(len(of_rank) != wanted_batches for of_rank in batches):
            raise ValueError(
                f"step {index}: {[len(b) for b in batches]} micro-batches, the case asks for {wanted_batches}"
            )
        if truth.has_logprobs and any(batch.logprobs is None for of_rank in batches for batch in of_rank):
            raise ValueError(f"step {index}: a micro-batch was recorded without its log-probabilities")
        self.clip_share = max(self.clip_share, truth.clip_share)
        if index == self.workload.steps() - 1:
            violations += self._ratio_clip()
        if fp16:
            violations += self._scales(index, records)
        overflow = fp16 and any(t is not None and not bool(torch.isfinite(t).all()) for t in truth.mean.values())
        self.overflows.append(overflow)
        violations += self._untrained(truth) if index == 0 else []
        violations += self._state_lost(index, records)
        used, unhanded, differing = assembled(records, self.shapes, "used")
        violations += [f"{name}: ranks were handed different gradients" for name in differing]
        after, _, _ = assembled(records, self.shapes, "master_after")
        saved, self.saved = self.saved, after
        violations += self._weights(records, after)
        others = [violation for violation in violations if violation not in initial]
        step = Step(
            index=index,
            loss=truth.loss,
            loss_error=truth.loss_error,
            logprob_error=truth.logprob_error,
            lr=self.workload.settings_at(index).lr,
            loss_scale_before=scale_before,
            loss_scale_after=records[0].loss_scale_after,
            loss_scale_expected=loss_scaling.expected(
                self.workload.case, self.ranks[0].wrapper, scale_before, self.overflows
            ),
            overflow=overflow,
            grad_norm_reported=tuple(record.grad_norm_reported for record in records),
            not_judged={} if fp16 else {"loss_scale": f"{self.workload.case['dtype']} has no loss scale"},
        )
        if overflow:
            return self._overflowed(step, records, before, after, violations)
        true_norm = norm(truth.mean)
        wanted = scaled(truth.mean, clip_coefficient(true_norm, self.clip))
        errors = tensor_errors(used, wanted)
        moments = _States(
            {key: assembled(records, self.shapes, f"moments.{key}")[0] for key in plain_optimizer.MOMENTS},
            {key: assembled(records, self.shapes, f"state_after.{key}")[0] for key in plain_optimizer.MOMENTS},
        )
        update_errors = self._update_errors(before, after, used, unhanded, moments, index)
        lora = self._lora(truth.mean, used)
        step = dataclasses.replace(
            step,
            grad_norm_true=true_norm,
            grad_norm_wanted=norm(wanted),
            grad_norm_used=norm(used),
            gradient_error=worst(*errors.values()),
            update_error=worst(*update_errors.values()),
            consistency=tuple(violations + lora),
            tensors=_worst(errors, update_errors),
            alternatives=self._alternatives(
                truth, used, batches, model, (before, after, unhanded, moments), index, others + lora
            )
            | self._own_rank(records, used, model, scale)
            | (self._masters_not_restored((saved, before), used, batches, scale, others) if resumed else {}),
        )
        self.previous = truth.mean
        return step

    def _stepped_before(self, index: int) -> int:
        """Steps that the inner optimizer has taken before this one: all but those that overflowed."""
        return index - sum(self.overflows[:index])

    def _ratio_clip(self) -> list[str]:
        """A case of several iterations is about the ratio clip, so it must have seen it bind."""
        if int(self.workload.case.get("num_iterations", 1)) == 1 or self.clip_share > 0:
            return []
        return ["the ratio clip never bound in this case, which cannot judge it"]

    def _scales(self, index: int, records: Sequence[StepRecord]) -> list[str]:
        """Ranks that disagree about the loss scale, and at the end a dynamic scale that stood still."""
        self.scales.append((records[0].loss_scale_before, records[0].loss_scale_after))
        found = []
        if any((record.loss_scale_before, record.loss_scale_after) != self.scales[-1] for record in records):
            found.append("ranks hold different loss scales")
        if index == self.workload.steps() - 1:
            found += loss_scaling.never_moved(self.workload.case, self.scales)
        return found

    def _overflowed(
        self, step: Step, records: Sequence[StepRecord], before: Tensors, after: Tensors, violations: list[str]
    ) -> Step:
        moved = [f"{n}: moved on an overflow step" for n in before if not torch.equal(before[n], after[n])]
        if any(record.inner_steps for record in records):
            moved.append("the inner optimizer was stepped on an overflow step")
        for rank, record in zip(self.ranks, records, strict=True):
            held = rank.steps[step.index - 1].pieces if step.index else []
            for earlier, piece in zip(held, record.pieces, strict=bool(held)):
                moved += [
                    f"{piece.name}: {moment} moved on an overflow step"
                    for moment, value in piece.state_after.items()
                    if not torch.equal(value, earlier.state_after.get(moment, torch.zeros_like(value)))
                ]
        reason = "overflow step: the reported norm is recorded, nothing may move"
        return dataclasses.replace(
            step,
            consistency=tuple(violations + sorted(set(moved))),
            not_judged={**step.not_judged, **dict.fromkeys(("reported_norm", "gradient_used", "update"), reason)},
        )

    def _initial(self, model: torch.nn.Module, masters: Tensors, steps_taken: int) -> list[str]:
        """Masters before the first step that are not the seeded weights, bitwise.

        steps_taken: how often the inner optimizer has stepped on a gradient of 0 before (a wrapper's dummy step), at
        the learning rate of a schedule's first step, or at the optimizer's own where the trainer makes its schedule
        later than its engine (transformers 5).
        """
        seeded = {name: parameter.detach().float() for name, parameter in model.named_parameters()}

        def moved(settings: Callable[[str], OptimizerSettings]) -> list[str]:
            found = []
            for name, master in masters.items():
                expected = seeded[name].view_as(master)
                for taken in range(steps_taken):
                    nothing = torch.zeros_like(expected)
                    expected = plain_optimizer.stepped(expected, nothing, {}, taken, settings(name)).master
                if not torch.equal(master, expected):
                    found.append(f"{name}: the initial master is not the seeded weight")
            return found

        return min(moved(functools.partial(self.workload.settings_at, 0)), moved(self.workload.settings), key=len)

    def _weights(self, records: Sequence[StepRecord], masters: Tensors) -> list[str]:
        found = set()
        for record in records:
            for name, (start, weight) in record.weights.items():
                # A weight of fewer bits than the case's is compared in the case's, and is not the master.
                dtype = torch.promote_types(weight.dtype, self.dtype)
                cast = masters[name].reshape(-1)[start : start + weight.numel()].to(dtype)
                if not torch.equal(weight.to(dtype), cast):
                    found.add(f"{name}: the weight computed with is not the cast master")
        return sorted(found)

    def _lora(self, truth: Mapping[str, torch.Tensor | None], used: Tensors) -> list[str]:
        """With B = 0 the gradient of A is 0, bitwise, while B has not moved: in the first step."""
        if self.workload.case.get("lora_b") != "zero" or self.previous:
            return []
        return [
            f"{name}: gradient of A is not bitwise 0 although B is 0"
            for name in truth
            if ".lora_A." in name and bool(used[name].any())
        ]

    def _update_errors(
        self,
        before: Tensors,
        after: Tensors,
        used: Tensors,
        unhanded: set[str],
        moments: _States,
        index: int,
        steps_ahead: int = 0,
    ) -> dict[str, float]:
        """By tensor: largest (|measured - plain| - one ulp), over the step's largest plain update.

        The same for each moment that the optimizer keeps, over the largest value of that moment. steps_ahead: by how
        much the inner optimizer's step count is too high.
        """
        filled = [name for name in before if before[name].numel()]
        expected = {
            name: plain_optimizer.stepped(
                before[name],
                None if name in unhanded else used[name],
                {key: moments.before[key][name] for key in moments.before},
                self._stepped_before(index) + steps_ahead,
                self.workload.settings_at(index, name),
            )
            for name in filled
        }
        largest = worst(*(float((expected[name].master - before[name]).abs().max()) for name in filled))
        errors = dict.fromkeys(before, 0.0)
        for name in filled:
            errors[name] = _share(_excess(after[name], expected[name].master), largest)
        for key in plain_optimizer.MOMENTS:
            kept = {name: expected[name].moments[key] for name in filled if key in expected[name].moments}
            largest = worst(*(float(value.abs().max()) for value in kept.values()))
            for name, value in kept.items():
                errors[name] = worst(errors[name], _share(_excess(moments.after[key][name], value), largest))
        return errors

    def _untrained(self, truth: Gradients) -> list[str]:
        """Parameters that the workload trains and the engine was given no trainable one of."""
        return [f"{name}: ought to be trained, and is not" for name in truth.mean if name not in self.shapes]

    def _state_lost(self, index: int, records: Sequence[StepRecord]) -> list[str]:
        """Moments handed to a step that are not, bitwise, what the step before left; none before the first."""
        found = set()
        for rank, record in zip(self.ranks, records, strict=True):
            earlier = rank.steps[index - 1].pieces if index else [None] * len(record.pieces)
            for before, piece in zip(earlier, record.pieces, strict=True):
                for moment, value in piece.moments.items():
                    left = None if before is None else before.state_after.get(moment)
                    if not torch.equal(value, torch.zeros_like(value) if left is None else left):
                        found.add(f"{piece.name}: {moment} is not what the step before left")
        return sorted(found)

    def _alternatives(
        self,
        truth: Gradients,
        used: Tensors,
        batches: Sequence[Sequence[MicroBatch]],
        model: torch.nn.Module,
        update: tuple[Tensors, Tensors, set[str], _States],
        index: int,
        others: list[str],
    ) -> dict[str, Alternative]:
        """others: what is not as it must be for reasons other than the initial masters."""
        for name, gradient in truth.mean.items():
            self.all_so_far[name] = _sum(self.all_so_far.get(name), gradient)
        found = {
            "truth": self._alternative(truth.mean, used),
            "unclipped": Alternative(reported_norm=norm(truth.mean), gradient=grams(used, truth.mean)),
        }
        if max(len(of_rank) for of_rank in batches) > 1:
            found["last_micro_batch"] = self._alternative(truth.last, used)
        if max(len(of_rank) for of_rank in batches) > 2:
            both = {name: _sum(first, truth.last[name]) for name, first in truth.first.items()}
            found["first_and_last_micro_batch"] = self._alternative(both, used)
        if index and index != self.workload.resumes_after():
            found["all_steps_so_far"] = self._alternative(dict(self.all_so_far), used)
            found["all_steps_so_far_unclipped"] = Alternative(
                reported_norm=norm(self.all_so_far), gradient=grams(used, self.all_so_far)
            )
        stale = {name: self.previous.get(name) for name, gradient in truth.mean.items() if gradient is None}
        if any(gradient is not None for gradient in stale.values()):
            found["previous_step"] = self._alternative({**truth.mean, **stale}, used)
        experts = {name for name in truth.mean if self.workload.is_expert(name)}
        if experts:
            shared = norm({name: gradient for name, gradient in truth.mean.items() if name not in experts})
            wanted = scaled(truth.mean, clip_coefficient(shared, self.clip))
            found["without_experts"] = Alternative(reported_norm=shared, gradient=grams(used, wanted))
        if any(s.kind == "adamw" or s.weight_decay for s in map(self.workload.settings, truth.mean)):
            before, after, unhanded, moments = update
            ahead = self._update_errors(before, after, used, unhanded, moments, index, 1)
            found["step_count_plus_one"] = Alternative(
                update_error=worst(*ahead.values()),
                consistency=tuple(others + (self._initial(model, before, steps_taken=1) if index == 0 else [])),
            )
        for name, workload in self.workload.alternatives().items():
            other = gradients(model, workload, batches)
            found[name] = dataclasses.replace(
                self._alternative(other.mean, used), forward_error=worst(other.loss_error, other.logprob_error)
            )
        return found

    def _own_rank(
        self, records: Sequence[StepRecord], used: Tensors, model: torch.nn.Module, scale: float
    ) -> dict[str, Alternative]:
        """What is used where each rank updates its partition with its own gradient, reduced over no other rank."""
        if not self.workload.may_skip_reduction():
            return {}
        own: dict[str, torch.Tensor | None] = {name: torch.zeros_like(value) for name, value in used.items()}
        for record in records:
            local = gradients(model, self.workload, [record.micro_batches], scale).mean
            for piece in record.pieces:
                whole, held = local[piece.name], own[piece.name]
                if whole is not None and held is not None:
                    span = slice(piece.start, piece.start + piece.master_before.numel())
                    held.view(-1)[span] = whole.reshape(-1)[span]
        return {"own_rank_only": self._alternative(own, used)}

    def _masters_not_restored(
        self,
        masters: tuple[Tensors, Tensors],
        used: Tensors,
        batches: Sequence[Sequence[MicroBatch]],
        scale: float,
        others: list[str],
    ) -> dict[str, Alternative]:
        """The first step after a checkpoint of which only the 16-bit weights were loaded, not their masters.

        It computes with what was saved, and updates the masters that the fresh engine was built with. masters: those
        that were saved, and those before this step. others: all that is not as it must be.
        """
        saved, before = masters
        fresh = self.workload.build()
        seed_weights(fresh, self.workload)
        self.workload.put_off(fresh)
        built = {name: p.detach().to(self.dtype).float() for name, p in fresh.named_parameters() if name in before}
        kept = {f"{name}: {NOT_RESTORED}" for name, master in built.items() if torch.equal(before[name], master)}
        load(self.model, saved)
        found = gradients(self.model, self.workload, batches, scale)
        load(self.model, before)
        if len(kept) == len(before):  # what an engine that keeps gradients has kept of this step
            self.all_so_far = dict(found.mean)
        alternative = dataclasses.replace(
            self._alternative(found.mean, used),
            forward_error=worst(found.loss_error, found.logprob_error),
            consistency=tuple(violation for violation in others if violation not in kept),
        )
        return {"masters_not_restored": alternative}

    def _alternative(self, gradient: Mapping[str, torch.Tensor | None], used: Tensors) -> Alternative:
        reported = norm(gradient)
        return Alternative(
            reported_norm=reported, gradient=grams(used, scaled(gradient, clip_coefficient(reported, self.clip)))
        )


def grams(used: Tensors, wanted: Mapping[str, torch.Tensor | None]) -> dict[str, Gram]:
    """Inner products of the used gradient with a wanted one, by tensor."""
    found = {}
    for name, gradient in used.items():
        g = gradient.double().reshape(-1)
        r = wanted.get(name)
        flat = torch.zeros_like(g) if r is None else r.double().reshape(-1)
        found[name] = Gram(float(g @ g), float(g @ flat), float(flat @ flat))
    return found


def tensor_errors(used: Tensors, wanted: Mapping[str, torch.Tensor | None]) -> dict[str, float]:
    """By tensor: |g - r| / max(|r|, |r_all| / sqrt(number of tensors)), fp64; 0 where all are 0."""
    floor = norm(wanted) / math.sqrt(max(1, len(used)))
    errors = {}
    for name, gradient in used.items():
        r = wanted.get(name)
        expected = torch.zeros_like(gradient) if r is None else r.view_as(gradient)
        difference = float((gradient.double() - expected.double()).norm())
        size = max(float(expected.double().norm()), floor)
        errors[name] = difference / size if size else (math.inf if difference else 0.0)
    return errors


def _worst(gradient_errors: Mapping[str, float], update_errors: Mapping[str, float]) -> tuple[TensorError, ...]:
    order = sorted(gradient_errors, key=lambda name: -max(gradient_errors[name], update_errors.get(name, 0.0)))
    return tuple(TensorError(name, gradient_errors[name], update_errors.get(name)) for name in order[:WORST])
