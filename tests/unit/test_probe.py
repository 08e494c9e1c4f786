"""What a release is reduced to, what counts as the same behaviour, and that nothing is run twice."""

from __future__ import annotations

import dataclasses
import io
from collections.abc import Mapping, Sequence
from pathlib import Path

import pytest
from rich.console import Console

from ci.interrupts import Interrupts
from ci.judge import judge_cell
from ci.matrix import Defect
from ci.plan import PlannedStack
from ci.probe import Failing, Kind, Outcome, Prober, alike, masked, numbers, outcome_of, settled, without_places
from ci.provision.overlay import NotUsable, OverlayRuntime, Release
from ci.provision.runtime import Environment, Recipe, Running
from ci.runrecord import CellRecord, Verdict
from tests.jobs import evidence as jobs
from tests.jobs import order as jobs_order
from tests.unit import synthetic
from tests.unit.synthetic import Faults

CELL = synthetic.cell(zero_stage=0, dtype="bf16", gradient_accumulation_steps=4)


def defect(id_: str, symptom: dict[str, object]) -> Defect:
    return Defect.model_validate(
        {
            "id": id_,
            "title": "a defect",
            "upstream": (),
            "where": {"zero_stage": 0},
            "affects": {"deepspeed": ">=0.17"},
            "symptom": symptom,
            "advice": "update",
        }
    )


NORM = defect("norm", {"reported_norm": {"times": "loss_scale"}})
FROZEN = defect("frozen", {"gradient_used": {"times": "1/loss_scale"}})
CRASH = defect("crash", {"raises": r"got \[0\]"})


def judged(faults: Faults | None = None, *ledger: Defect) -> CellRecord:
    return judge_cell(CELL, synthetic.evidence(CELL, "0.18.0", faults), synthetic.matrix(ledger))


def test_clean_evidence_passes() -> None:
    assert outcome_of(judged()) == Outcome(kind=Kind.PASSES, verdict=Verdict.OK)


def test_a_wrong_number_is_its_check_its_steps_and_its_factor() -> None:
    outcome = outcome_of(judged(Faults(defects=[NORM])))
    assert outcome.kind is Kind.WRONG
    assert outcome.failing == (Failing(check="reported_norm", factors=(65500.0, 65500.0, 65500.0)),)
    assert outcome.verdict is Verdict.REGRESSION


def test_the_signature_does_not_depend_on_the_ledger_and_the_verdict_does() -> None:
    known, unknown = outcome_of(judged(Faults(defects=[NORM]), NORM)), outcome_of(judged(Faults(defects=[NORM])))
    assert (known.verdict, known.defects) == (Verdict.KNOWN_DEFECT, ("norm",))
    assert alike(known, unknown)


def test_different_factors_checks_and_steps_are_different_behaviours() -> None:
    found = [
        outcome_of(judged()),
        outcome_of(judged(Faults(defects=[NORM]))),
        outcome_of(judged(Faults(defects=[FROZEN]))),
        outcome_of(judged(Faults(defects=[NORM, FROZEN]))),
        outcome_of(judged(Faults(raises="got [0] but expected shape compatible with [96]"))),
        Outcome(kind=Kind.COULD_NOT_RUN, why="killed"),
    ]
    assert [[alike(one, other) for other in found] for one in found] == [
        [one == other for other in range(len(found))] for one in range(len(found))
    ]


def test_a_factor_that_moves_by_rounding_is_the_same_and_by_a_tenth_is_not() -> None:
    def outcome(factor: float) -> Outcome:
        return Outcome(kind=Kind.WRONG, failing=(Failing(check="reported_norm", factors=(None, factor)),))

    assert alike(outcome(1.349), outcome(1.351))
    assert not alike(outcome(1.35), outcome(1.5))


def test_exceptions_are_compared_without_their_numbers() -> None:
    one, other = (outcome_of(judged(Faults(raises=f"got [0], expected [{size}]\nmore"))) for size in (96, 4096))
    assert one.exception == "RuntimeError: got [#], expected [#]"
    assert alike(one, other)
    assert masked("at 0x7f3a: 1.5e-05 != 2") == "at #: # != #"


def test_the_folders_of_a_machine_do_not_reach_a_page() -> None:
    said = "cannot import name 'x' from 'torch' (/home/me/venvs/stable-1/lib/python3.11/site-packages/torch/api.py)"
    assert without_places(said) == "cannot import name 'x' from 'torch' (torch/api.py)"
    assert without_places("no such file: '/tmp/a/b.json'; 1/2 of a/b") == "no such file: 'b.json'; 1/2 of a/b"


def test_what_could_not_run_is_no_behaviour() -> None:
    outcome = outcome_of(judge_cell(CELL, None, synthetic.matrix()))
    assert outcome.kind is Kind.COULD_NOT_RUN and not outcome.counts
    assert outcome.why == "no evidence: the case ended before it recorded any"


def test_repeats_that_agree_settle_and_one_of_five_may_differ() -> None:
    right, wrong = judged(), judged(Faults(defects=[NORM]))
    probe = settled([wrong, wrong])
    assert probe is not None and probe.outcome.kind is Kind.WRONG
    assert numbers(probe.reported) == "65500 65500 65500" and numbers(probe.used) == "1 1 1"
    assert settled([right, wrong]) is None
    odd = settled([right, wrong, right, right, right])
    assert odd is not None and (odd.outcome.kind, odd.runs) == (Kind.PASSES, 5)
    assert settled([right, wrong, right, wrong, right]) is None


class Ended:
    """A process that is over."""

    def __init__(self, log: Path) -> None:
        self.log_path = log

    def poll(self) -> int | None:
        return 0

    def wait(self, timeout: float | None = None) -> int | None:
        return 0

    def terminate(self) -> None:
        pass


class StandIn(OverlayRuntime):
    """An overlay that records what `behaves` says for a repeat, and counts how often it was started."""

    def __init__(self, root: Path, behaves: Mapping[int, Faults], unusable: NotUsable | None = None) -> None:
        super().__init__(root)
        self.root, self.behaves, self.unusable = root, behaves, unusable
        self.started: list[list[str]] = []

    def overlay(self, recipe: Recipe, release: Release) -> Environment:
        if self.unusable is not None:
            raise self.unusable
        folder = self.root / f"overlay-{release.version}"
        packages = {"deepspeed": release.version, "torch": "2.13.0+cpu"}
        return Environment("venv", "made-up", "python", packages, folder=folder)

    def start(
        self,
        environment: Environment,
        order_file: Path,
        results_dir: Path,
        workers: int = 1,
        extra_env: Mapping[str, str] | None = None,
        inputs: Sequence[Path] = (),
    ) -> Running:
        ordered = jobs_order.read(order_file)
        self.started.append([cell.id.rpartition("/")[2] for cell in ordered.cells])
        with (results_dir / "evidence.jsonl").open("a") as stream:
            for cell in ordered.cells:
                number = int(cell.id.rpartition("/repeat")[2])
                if number not in self.behaves:
                    continue
                asked = dataclasses.replace(CELL, id=cell.id)
                record = synthetic.recorded(asked, environment.packages["deepspeed"], self.behaves[number])
                stream.write(jobs.to_json(record).strip() + "\n")
        return Ended(results_dir / "pytest.log")


@pytest.fixture
def recipe(tmp_path: Path) -> Recipe:
    return Recipe("made-up", "cpu", "3.11", None, {}, tmp_path / "cpu.Dockerfile", "")


def probe(root: Path, recipe: Recipe, runtime: StandIn, repeats: int = 2) -> tuple[Outcome, int]:
    stack = PlannedStack("made-up", {"deepspeed": "0.18.9", "torch": "2.13.0+cpu"}, None, check_pins=True)
    console = Console(file=io.StringIO())
    with Interrupts() as interrupts:
        prober = Prober(synthetic.matrix([NORM]), runtime, recipe, stack, root / "out", interrupts, console)
        found = prober.probe(Release("deepspeed", "0.17.6"), [CELL], repeats)[CELL.id]
    return found.outcome, found.runs


CLEAN, WRONG = Faults(), Faults(defects=[NORM])


def test_a_release_is_asked_twice_in_one_start_and_judged_by_its_own_version(tmp_path: Path, recipe: Recipe) -> None:
    runtime = StandIn(tmp_path, {1: WRONG, 2: WRONG})
    outcome, runs = probe(tmp_path, recipe, runtime)
    assert (outcome.kind, outcome.verdict, runs) == (Kind.WRONG, Verdict.KNOWN_DEFECT, 2)
    assert runtime.started == [["repeat1", "repeat2"]]


def test_what_was_run_before_is_not_run_again(tmp_path: Path, recipe: Recipe) -> None:
    runtime = StandIn(tmp_path, {1: WRONG, 2: WRONG})
    assert probe(tmp_path, recipe, runtime, repeats=1) == probe(tmp_path, recipe, runtime, repeats=1)
    assert runtime.started == [["repeat1"]]
    probe(tmp_path, recipe, runtime)
    assert runtime.started == [["repeat1"], ["repeat2"]]


def test_one_that_disagrees_with_itself_is_asked_three_times_more(tmp_path: Path, recipe: Recipe) -> None:
    runtime = StandIn(tmp_path, {1: WRONG, 2: CLEAN, 3: WRONG, 4: WRONG, 5: WRONG})
    outcome, runs = probe(tmp_path, recipe, runtime)
    assert (outcome.kind, runs) == (Kind.WRONG, 5)
    assert runtime.started == [["repeat1", "repeat2"], ["repeat3", "repeat4", "repeat5"]]


def test_one_that_never_agrees_is_no_behaviour(tmp_path: Path, recipe: Recipe) -> None:
    outcome, runs = probe(tmp_path, recipe, StandIn(tmp_path, {1: WRONG, 2: CLEAN, 3: WRONG, 4: CLEAN, 5: WRONG}))
    assert (outcome.kind, outcome.counts, runs) == (Kind.UNSTEADY, False, 5)


def test_a_crash_is_told_and_not_remembered(tmp_path: Path, recipe: Recipe) -> None:
    runtime = StandIn(tmp_path, {})
    outcome, _ = probe(tmp_path, recipe, runtime)
    assert outcome.kind is Kind.COULD_NOT_RUN
    assert outcome.why is not None and outcome.why.startswith("pytest ended with exit code 0 and left no evidence")
    probe(tmp_path, recipe, runtime)
    assert len(runtime.started) == 2


@pytest.mark.parametrize(("what", "kind"), [("installed", Kind.NOT_INSTALLED), ("imported", Kind.NOT_IMPORTED)])
def test_what_cannot_be_set_up_says_why(tmp_path: Path, recipe: Recipe, what: str, kind: Kind) -> None:
    release = Release("deepspeed", "0.14.0")
    runtime = StandIn(tmp_path, {}, NotUsable(release, what, "ValueError: no intel_extension_for_pytorch"))
    outcome, _ = probe(tmp_path, recipe, runtime)
    assert (outcome.kind, outcome.why) == (kind, "ValueError: no intel_extension_for_pytorch")
