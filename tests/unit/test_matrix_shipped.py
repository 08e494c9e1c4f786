"""The matrix.yaml of this repository: what it promises to users beyond being well-formed."""

from __future__ import annotations

import functools
from pathlib import Path

import pytest
from packaging.specifiers import SpecifierSet

from ci import cases, survey
from ci.checks import MEASURED
from ci.commands.schema import schemas
from ci.matrix import Defect, Matrix, Scalar, Where, load
from ci.plan import Plan, Selection, make_plan

ROOT = Path(__file__).parents[2]
LANES = ("nightly", "pull-request", "weekly")
CPU_STACKS = ("frozen-update", "newest", "report-a", "report-a-018", "report-b", "stable")
SWIFT_STACKS = ("swift-3.10.2", "swift-3.10.2-fixed", "swift-newest")
SLOWEST_LANE_S = 240
"""What the pull-request lane may take on two cores."""
ENGINE_S, SWEEP_S, TRL_S, START_S = 3, 1.5, 15, 30
"""Generous times of one cell and of the start: measured were 2, 0.6, 8 and 8 (docs/benchmarks.md)."""


@functools.cache
def shipped() -> Matrix:
    return load(ROOT / "matrix.yaml")


@functools.cache
def lane(name: str) -> Plan:
    return make_plan(shipped(), Selection(lane=name, stacks=CPU_STACKS))


@pytest.mark.parametrize(
    ("stack", "deepspeed", "transformers", "accelerate", "trl", "peft"),
    [
        ("newest", "0.19.8", "5.24.0", "1.15.0", "1.16.0", "0.21.2"),
        ("stable", "0.18.9", "4.57.6", "1.12.0", "0.24.0", "0.17.1"),
        ("frozen-update", "0.18.5", "4.57.6", "1.12.0", "0.24.0", "0.17.1"),
        ("report-a-018", "0.18.2", "4.57.6", "1.12.0", "0.24.0", "0.17.1"),
        ("report-a", "0.17.6", "4.57.6", "1.12.0", "0.24.0", "0.17.1"),
        ("report-b", "0.15.4", "4.46.2", "1.1.1", "0.17.0", "0.13.2"),
        ("swift-3.10.2", "0.17.6", "4.57.6", "1.12.0", "0.24.0", "0.17.1"),
        ("swift-3.10.2-fixed", "0.18.9", "4.57.6", "1.12.0", "0.24.0", "0.17.1"),
        ("swift-newest", "0.19.8", "5.19.0", "1.15.0", "0.29.1", "0.20.0"),
    ],
)
def test_the_stacks_are_those_that_were_asked_for(
    stack: str, deepspeed: str, transformers: str, accelerate: str, trl: str, peft: str
) -> None:
    pins = shipped().stacks[stack].pins
    assert pins["torch"] == "2.13.0+cpu"
    assert (pins["deepspeed"], pins["transformers"], pins["accelerate"], pins["trl"], pins["peft"]) == (
        deepspeed,
        transformers,
        accelerate,
        trl,
        peft,
    )


def test_every_shipped_cpu_stack_is_known_here() -> None:
    assert tuple(name for name, stack in shipped().stacks.items() if stack.backend == "cpu") == (
        *CPU_STACKS,
        *SWIFT_STACKS,
    )


def claims(defect: Defect, plan: Plan) -> list[str]:
    """The runnable cells that a ledger entry claims."""
    found = []
    for cell in plan.runnable:
        pins = plan.stacks[cell.stack].pins
        affected = all(SpecifierSet(wanted).contains(pins[package]) for package, wanted in defect.affects.items())
        if affected and cases.matches(defect.where, {**cell.case, "job": cell.job}):
            found.append(cell.id)
    return found


@pytest.mark.parametrize("name", LANES)
def test_every_defect_of_the_ledger_shows_in_the_lane_over_the_shipped_stacks(name: str) -> None:
    unseen = {defect.id for defect in shipped().defects if not claims(defect, lane(name))}
    assert unseen <= surveyed()


def surveyed() -> set[str]:
    """Entries that a committed survey of releases shows, and others whose symptom is that of one of them."""
    surveys = [survey.read(path) for path in sorted((ROOT / "docs").glob("survey-*.json"))]
    rows = [row for each in surveys for row in each.rows]
    named = {defect for row in rows for outcome in row.outcomes.values() for defect in outcome.defects}
    symptoms = [defect.symptom for defect in shipped().defects if defect.id in named]
    return {defect.id for defect in shipped().defects if defect.symptom in symptoms}


def test_the_pull_request_lane_is_short_and_on_newest() -> None:
    plan = make_plan(shipped(), Selection())
    assert list(plan.stacks) == ["newest"]
    trl = sum(cell.case.get("trainer") == "trl" for cell in plan.cells)
    sweep = sum(cell.job == "engine-sweep" for cell in plan.cells)
    rest = len(plan.cells) - trl - sweep
    assert START_S + ENGINE_S * rest + SWEEP_S * sweep + TRL_S * trl <= SLOWEST_LANE_S


def test_no_shipped_stack_is_gated_out_of_a_lane() -> None:
    assert [cell.id for name in LANES for cell in lane(name).cells if cell.gated] == []


def test_the_report_s_own_command_has_a_lane_and_is_no_cell_of_the_others() -> None:
    plan = make_plan(shipped(), Selection(lane="reports"))
    grpo = [f"grpo-lora/ms-swift-zero{stage}-bf16-gas4" for stage in (0, 2, 3)]
    sft = ["zero2-keepalive-after", "zero2-plain", "keepalive-after", "plain", "keepalive-after-frozen"]
    cells = [*grpo, *(f"zero3-custom-adapter/ms-swift-{case}" for case in sft)]
    names = [f"cpu/{stack}/{cell}" for stack in SWIFT_STACKS for cell in cells]
    assert [cell.id for cell in plan.runnable] == [cell.id for cell in plan.cells] == names
    assert make_plan(shipped(), Selection(stacks=SWIFT_STACKS)).cells == plan.cells, "it is the lane of these stacks"
    for cell in plan.cells:
        assert set(MEASURED) <= set(shipped().tolerances_for(cell.job, cell.case))
    assert not any(cell.case.get("trainer") == "ms-swift" for name in LANES for cell in lane(name).cells)


def test_each_stage_has_a_binding_and_a_free_clip_every_night() -> None:
    for stage in (0, 1, 2, 3):
        for dtype in ("bf16", "fp32"):
            clips = {
                cell.case["gradient_clipping"]
                for cell in lane("nightly").cells
                if cell.job == "grpo-lora" and (cell.case["zero_stage"], cell.case["dtype"]) == (stage, dtype)
            }
            assert {"unset", "loose", "binding"} <= clips


def test_the_cases_that_the_contract_wants_once_run_every_night() -> None:
    of_lora = [cell.case for cell in lane("nightly").cells if cell.job == "grpo-lora"]
    wanted: tuple[Where, ...] = (
        {"num_iterations": 2},
        {"beta": 0.04},
        {"lora_b": "zero"},
        {"optimizer": "adamw"},
        *({"zero_stage": 0, "world_size": ranks} for ranks in (1, 2, 4)),
    )
    for where in wanted:
        assert any(cases.matches(where, case) for case in of_lora), where


def test_the_whole_night_contains_every_pull_request_cell_and_the_week_every_cell_of_the_night() -> None:
    """A cell seen red in a pull request must be found again in the slower lanes."""
    ids = {name: {cell.id for cell in lane(name).cells} for name in LANES}
    assert sorted(ids["pull-request"] - ids["nightly"]) == []
    assert sorted(ids["nightly"] - ids["weekly"]) == []


def test_every_cell_of_every_lane_has_its_tolerances() -> None:
    """Without one a check would be an `error` at night, when nobody looks."""
    lacking = set()
    for name in LANES:
        for cell in lane(name).cells:
            found = shipped().tolerances_for(cell.job, cell.case) or {}
            # Measured for itself: the fall-back to another accumulation is for a user's own configuration.
            accumulations = {
                steps
                for group in shipped().tolerances
                if group.job in (None, cell.job)
                and cell.case["zero_stage"] in group.stages
                and cell.case["dtype"] == group.dtype
                for steps in group.gradient_accumulation_steps
            }
            measured = cell.case.get("gradient_accumulation_steps", 1) in accumulations
            if not measured or not set(MEASURED) <= set(found):
                keys = ("zero_stage", "dtype", "gradient_accumulation_steps")
                lacking.add((cell.job, *(cell.case.get(key) for key in keys)))
    assert sorted(lacking, key=str) == []


def test_the_committed_schemas_are_up_to_date() -> None:
    stale = [path.name for path, text in schemas().items() if path.read_text(encoding="utf-8") != text]
    assert not stale, "run `python -m ci schema` and commit"


IDS: dict[str, dict[str, dict[str, Scalar]]] = {
    "grpo-lora": {
        "zero0-bf16": {"zero_stage": 0, "dtype": "bf16"},
        "zero0-bf16-gas4": {"zero_stage": 0, "dtype": "bf16", "gradient_accumulation_steps": 4},
        "trl-zero3-bf16-gas4": {"trainer": "trl", "zero_stage": 3, "dtype": "bf16", "gradient_accumulation_steps": 4},
        "zero0-bf16-adamw": {"zero_stage": 0, "dtype": "bf16", "optimizer": "adamw"},
        "trl-zero0-fp32-sgd": {"trainer": "trl", "zero_stage": 0, "dtype": "fp32", "optimizer": "sgd"},
        "zero2-fp32-clip-binding-ws4": {
            "zero_stage": 2,
            "dtype": "fp32",
            "gradient_clipping": "binding",
            "world_size": 4,
        },
        "zero1-fp32-iter2-beta0.04-b-zero": {
            "zero_stage": 1,
            "dtype": "fp32",
            "num_iterations": 2,
            "beta": 0.04,
            "lora_b": "zero",
        },
    },
    "zero3-custom-adapter": {
        "plain": {"user_code": "plain"},
        "zero2-bf16-keepalive-after-ckpt-non-reentrant-frozen-init-outside": {
            "zero_stage": 2,
            "dtype": "bf16",
            "user_code": "keepalive-after",
            "checkpointing": "non-reentrant",
            "frozen": True,
            "init": "outside",
        },
    },
    "fp16-optimizers": {
        "fp16": {"dtype": "fp16"},
        "fp16-clip-0.75-fused-legacy-scale-init4-window1": {
            "dtype": "fp16",
            "gradient_clipping": 0.75,
            "optimizer": "fused",
            "step_method": "legacy",
            "loss_scale": "init4-window1",
        },
        "fp16-clip-0-engine": {"dtype": "fp16", "gradient_clipping": 0, "path": "engine"},
        "zero2-fp16": {"dtype": "fp16", "zero_stage": 2},
        "fp16-experts": {"dtype": "fp16", "experts": True},
    },
}
"""Addresses that stand in reports and issues. Do not change one: add a key with a default instead."""


@pytest.mark.parametrize(("job", "wanted"), [(job, wanted) for job, ids in IDS.items() for wanted in ids])
def test_ids_are_stable(job: str, wanted: str) -> None:
    entry = shipped().jobs[job]
    assert cases.name(entry, cases.resolve(entry, IDS[job][wanted])) == wanted
