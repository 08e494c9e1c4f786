"""From a command line to cells: what is selected, what is gated, and that a cell's own command selects it alone."""

from __future__ import annotations

import json
import shlex
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ci.errors import EnvironmentUnavailable, ExitCode, NothingToRun, UsageError
from ci.matrix import Job, Lane, Matrix, load
from ci.plan import Cell, Plan, Selection, make_plan
from tests.unit.small_matrix import write

SHIPPED = load(Path(__file__).parents[2] / "matrix.yaml")


@pytest.fixture
def matrix(tmp_path: Path) -> Matrix:
    return load(write(tmp_path))


def names(plan: Plan) -> list[str]:
    return [cell.id for cell in plan.cells]


def selection_of(command: str) -> Selection:
    """A cell's command as the Selection that it stands for."""
    words = shlex.split(command)
    assert words[:2] == ["nox", "-s"] and words[3] == "--", command
    given: dict[str, list[str]] = {}
    for option, value in zip(words[4::2], words[5::2], strict=True):
        given.setdefault(option, []).append(value)
    return Selection(
        backend=words[2].removesuffix("-zero"),
        lane=given.pop("--lane", ["pull-request"])[0],
        stacks=tuple(given.pop("--stack", ())),
        jobs=tuple(given.pop("--job", ())),
        cases=tuple(given.pop("--case", ())),
        replacements=tuple(given.pop("--with", ())),
        world_size=next((int(ranks) for ranks in given.pop("--world-size", ())), None),
        adapter=next(iter(given.pop("--adapter", ())), None),
        ds_config=next((Path(file) for file in given.pop("--ds-config", ())), None),
        repeat=tuple(word for option, values in given.items() for value in values for word in (option, value)),
    )


def test_the_default_is_the_pull_request_lane(matrix: Matrix) -> None:
    assert names(make_plan(matrix, Selection())) == [
        "cpu/new/adapter/keepalive",
        "cpu/new/lora/zero0-bf16",
        "cpu/new/lora/zero0-bf16-gas4",
        "cpu/new/lora/zero2-bf16",
        "cpu/new/lora/zero2-bf16-gas4",
        "cpu/new/lora/trl-zero0-bf16",
    ]


def test_a_cell_has_every_key_of_its_job(matrix: Matrix) -> None:
    cell = make_plan(matrix, Selection(cases=("trainer=trl",))).cells[0]
    assert list(cell.case.items()) == [
        ("trainer", "trl"),
        ("zero_stage", 0),
        ("dtype", "bf16"),
        ("gradient_accumulation_steps", 1),
        ("gradient_clipping", "unset"),
        ("optimizer", "adamw"),
        ("world_size", 2),
    ]
    assert (cell.world_size, cell.timeout_s, cell.gated, cell.corrections) == (2, 90, None, ())


def test_stacks_replace_the_lanes_and_keep_its_cases(matrix: Matrix) -> None:
    both = make_plan(matrix, Selection(stacks=("old", "new", "old")))
    assert list(both.stacks) == ["old", "new"]  # in the order asked for, each once
    assert [cell.id.split("/", 2)[2] for cell in both.cells if cell.stack == "old"] == [
        cell.id.split("/", 2)[2] for cell in both.cells if cell.stack == "new"
    ]


def test_a_stack_s_own_lane_is_run_where_none_is_asked_for(matrix: Matrix) -> None:
    stacks = {**matrix.stacks, "old": matrix.stacks["old"].model_copy(update={"lane": "nightly"})}
    matrix = matrix.model_copy(update={"stacks": stacks})
    plan = make_plan(matrix, Selection(stacks=("old",)))
    assert plan.lane == "nightly" and plan.cells == make_plan(matrix, Selection(lane="nightly", stacks=("old",))).cells
    assert "--lane" not in plan.cells[0].command
    other = make_plan(matrix, Selection(lane="pull-request", stacks=("old",)))
    assert other.lane == "pull-request" and "--lane pull-request" in other.cells[0].command
    assert make_plan(matrix, Selection()).lane == "pull-request"
    with pytest.raises(UsageError, match=r"stacks new, old have lanes of their own, nightly, pull-request; name one"):
        make_plan(matrix, Selection(stacks=("new", "old")))


def test_filters_narrow_by_job_and_case(matrix: Matrix) -> None:
    assert names(make_plan(matrix, Selection(jobs=("adapter",)))) == ["cpu/new/adapter/keepalive"]
    both = ("zero_stage=2,gradient_accumulation_steps=4", "user_code=keepalive")
    assert names(make_plan(matrix, Selection(cases=both))) == [
        "cpu/new/adapter/keepalive",
        "cpu/new/lora/zero2-bf16-gas4",
    ]


def test_a_lane_lists_overlapping_patterns_once_and_leaves_out_what_does_not_exist(matrix: Matrix) -> None:
    ids = names(make_plan(matrix, Selection(lane="nightly", stacks=("new",))))
    assert len(ids) == len(set(ids))
    assert "cpu/new/lora/zero1-bf16" in ids
    assert "cpu/new/lora/zero1-fp32" not in ids  # the lane's exclusion


@pytest.mark.parametrize(
    ("asked", "says"),
    [
        (Selection(stacks=("newe",)), "unknown stack 'newe'; did you mean new? known: current, new, old"),
        (Selection(stacks=("on-npu",)), "stack on-npu belongs to backend npu; those of cpu: new, old"),
        (Selection(jobs=("lara",)), "unknown job 'lara'; did you mean lora?"),
        (Selection(backend="cpuu"), "unknown backend 'cpuu'; did you mean cpu?"),
        (Selection(lane="nightlt"), "unknown lane 'nightlt'; did you mean nightly?"),
        (Selection(jobs=("lora",), cases=("user_code=plain",)), "unknown case key 'user_code'"),
        (Selection(cases=("dtype=bf17",)), "unknown value 'bf17' of dtype; did you mean bf16?"),
        (Selection(world_size=0), "--world-size: found 0"),
        (Selection(shard="0/4"), "expected i/n"),
        (Selection(shard="5/4"), "expected i/n"),
        (Selection(shard="1-4"), "expected i/n"),
        (Selection(replacements=("deepspeed",)), "expected PKG=VERSION"),
        (Selection(replacements=("deepsped=0.18",)), "no pin of 'deepsped'; did you mean deepspeed?"),
        (Selection(replacements=("deepspeed=0.18", "DeepSpeed=0.17")), "--with deepspeed is given twice"),
        (Selection(replacements=("deepspeed=newest",)), "neither a version nor a file"),
        (Selection(replacements=("deepspeed=./nowhere",)), "nowhere does not exist"),
        (Selection(stacks=("current",)), "--stack current needs --runtime host"),
        (Selection(stacks=("current", "new"), current={}), "cannot be combined"),
        (Selection(stacks=("current",), current={}, replacements=("trl=1",)), "--with makes an environment"),
    ],
)
def test_wrong_use_is_one_message(asked: Selection, says: str, matrix: Matrix) -> None:
    with pytest.raises(UsageError) as caught:
        make_plan(matrix, asked)
    assert says in caught.value.message
    assert caught.value.exit_code == ExitCode.USAGE
    assert "\n" not in caught.value.message


def test_an_unavailable_backend_says_why(matrix: Matrix) -> None:
    with pytest.raises(EnvironmentUnavailable, match="backend npu: no image yet") as caught:
        make_plan(matrix, Selection(backend="npu"))
    assert caught.value.exit_code == ExitCode.UNAVAILABLE


@pytest.mark.parametrize(
    ("asked", "says"),
    [
        (Selection(cases=("zero_stage=1",)), "found with --lane nightly (2 cases)"),
        (Selection(jobs=("lora",), cases=("zero_stage=3,dtype=fp32,world_size=64",)), "nor any of another lane"),
        (Selection(jobs=("adapter",), shard="2/2"), "no cell is left for this shard"),
    ],
)
def test_an_empty_selection_says_where_to_look(asked: Selection, says: str, matrix: Matrix) -> None:
    with pytest.raises(NothingToRun) as caught:
        make_plan(matrix, asked)
    assert says in caught.value.message
    assert caught.value.exit_code == ExitCode.USAGE


def test_pins_gate_a_job_and_a_case(matrix: Matrix) -> None:
    old = make_plan(matrix, Selection(stacks=("old",)))
    assert {cell.id: cell.gated for cell in old.cells if cell.gated} == {
        "cpu/old/lora/trl-zero0-bf16": "needs trl >=0.17, stack old has 0.15.2 (bnpo)"
    }
    assert len(old.runnable) == 5
    old.require_runnable()
    none = make_plan(matrix, Selection(replacements=("deepspeed=0.14.3",)))
    assert none.runnable == ()
    with pytest.raises(NothingToRun, match=r"needs deepspeed >=0\.14\.4, stack new has 0\.14\.3"):
        none.require_runnable()


def test_a_release_candidate_is_in_the_range_of_its_release(matrix: Matrix) -> None:
    assert make_plan(matrix, Selection(replacements=("deepspeed=0.20.0rc1",))).runnable


def test_with_replaces_one_pin_of_every_stack(matrix: Matrix, tmp_path: Path) -> None:
    plan = make_plan(matrix, Selection(stacks=("new", "old"), replacements=("deepspeed==0.18.9",)))
    assert [stack.pins["deepspeed"] for stack in plan.stacks.values()] == ["0.18.9", "0.18.9"]
    assert plan.stacks["new"].pins["trl"] == "1.16.0"
    wheel = tmp_path / "deepspeed-0.19.9-py3-none-any.whl"
    wheel.touch()
    assert (
        make_plan(matrix, Selection(replacements=(f"deepspeed={wheel}",))).stacks["new"].pins["deepspeed"] == "0.19.9"
    )


def test_a_checkout_has_no_pin_and_gates_nothing(matrix: Matrix, tmp_path: Path) -> None:
    (tmp_path / "trl").mkdir()
    (tmp_path / "trl" / "setup.py").touch()
    plan = make_plan(matrix, Selection(stacks=("old",), replacements=(f"trl={tmp_path / 'trl'}",)))
    assert "trl" not in plan.stacks["old"].pins
    assert [cell.gated for cell in plan.cells if cell.gated] == []


@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("trl-1.0-py3-none-any.whl", "this is a wheel of trl; expected one of deepspeed"),
        ("deepspeed.tar.gz", "expected a wheel or the folder of a checkout"),
        ("folder/", "has neither pyproject.toml nor setup.py"),
    ],
)
def test_with_looks_at_what_it_is_given(name: str, says: str, matrix: Matrix, tmp_path: Path) -> None:
    path = tmp_path / name
    if name.endswith("/"):
        path.mkdir()
    else:
        path.touch()
    with pytest.raises(UsageError) as caught:
        make_plan(matrix, Selection(replacements=(f"deepspeed={path}",)))
    assert says in caught.value.message


def test_current_takes_what_is_installed_and_names_the_nearest_stack(matrix: Matrix) -> None:
    installed = {"DeepSpeed": "0.15.4", "torch": "2.13.0+cpu", "numpy": "2.0"}
    plan = make_plan(matrix, Selection(stacks=("current",), current=installed))
    stack = plan.stacks["current"]
    assert (stack.pins, stack.nearest, stack.lock, stack.check_pins) == (
        {"deepspeed": "0.15.4", "torch": "2.13.0+cpu"},
        "old",
        None,
        False,
    )
    gated = {cell.job: cell.gated for cell in plan.cells if cell.gated}
    assert gated == {"lora": "needs trl >=0.17, which stack current does not have (bnpo)"}


def test_world_size_is_for_cells_that_do_not_fix_it(matrix: Matrix) -> None:
    asked = Selection(lane="nightly", stacks=("new",), world_size=4, cases=("zero_stage=0,dtype=bf16",))
    plan = make_plan(matrix, asked)
    sizes = {cell.id.rsplit("/")[-1]: cell.world_size for cell in plan.cells if cell.job == "lora"}
    assert sizes["zero0-bf16-gas4-ws4"] == 4  # did not fix it
    assert sizes["zero0-bf16-ws1"] == 1  # fixes it
    assert sizes["zero0-bf16"] == 2  # fixes it at the default
    adapter = make_plan(matrix, Selection(world_size=4, jobs=("adapter",))).cells[0]
    assert adapter.world_size == 4  # a job without the key takes it all the same


@given(count=st.integers(1, 12))
def test_shards_are_a_partition(count: int) -> None:
    asked = Selection(lane="nightly", stacks=("newest", "stable"), jobs=("grpo-lora",))
    whole = names(make_plan(SHIPPED, asked))
    parts = [names(make_plan(SHIPPED, replace(asked, shard=f"{i}/{count}"))) for i in range(1, count + 1)]
    assert sorted(id for part in parts for id in part) == sorted(whole)
    assert max(map(len, parts)) - min(map(len, parts)) <= 1


def test_a_command_stays_exact_when_only_the_world_size_given_tells_cells_apart() -> None:
    lane = Lane(
        stacks=("newest",),
        cases={
            "grpo-lora": (
                {"zero_stage": 0, "dtype": "bf16", "world_size": 2},
                {"zero_stage": 0, "dtype": "bf16", "beta": 0.5},
            )
        },
    )
    matrix = SHIPPED.model_copy(update={"lanes": {"pull-request": lane}})
    assert_each_command_selects_its_cell(matrix, make_plan(matrix, Selection(world_size=3)).cells)


def assert_each_command_selects_its_cell(matrix: Matrix, cells: Sequence[Cell]) -> None:
    for cell in cells:
        again = make_plan(matrix, selection_of(cell.command)).cells
        assert [(other.id, other.command, other.case) for other in again] == [(cell.id, cell.command, cell.case)]


@pytest.mark.parametrize("lane", ["pull-request", "nightly", "weekly"])
@pytest.mark.parametrize("world_size", [None, 3])
def test_a_cells_command_selects_that_cell_alone(lane: str, world_size: int | None) -> None:
    plan = make_plan(SHIPPED, Selection(lane=lane, stacks=("report-a",), world_size=world_size))
    step = max(1, len(plan.cells) // 25)
    assert_each_command_selects_its_cell(SHIPPED, plan.cells[::step])


VALUES: Mapping[str, Sequence[int | str]] = {
    "trainer": ("engine", "trl"),
    "zero_stage": (0, 1, 2, 3),
    "dtype": ("bf16", "fp32"),
    "gradient_accumulation_steps": (1, 2, 4),
    "gradient_clipping": ("unset", "loose", 0, "binding"),
    "optimizer": ("sgd", "adamw"),
    "world_size": (1, 2, 4),
}


@st.composite
def lanes(draw: st.DrawFn) -> Lane:
    """A lane of a few patterns that overlap in any way."""
    patterns = []
    for _ in range(draw(st.integers(1, 4))):
        pattern: dict[str, tuple[int | str, ...]] = {}
        for key, values in VALUES.items():
            chosen = draw(st.lists(st.sampled_from(values), min_size=1, max_size=3, unique=True))
            if key in ("zero_stage", "dtype") or draw(st.booleans()):
                pattern[key] = tuple(chosen)
        patterns.append(pattern)
    return Lane(stacks=("newest",), cases={"grpo-lora": tuple(patterns)})


@settings(max_examples=40)
@given(lane=lanes(), world_size=st.sampled_from([None, 1, 3]), data=st.data())
def test_a_cells_command_selects_it_alone_in_any_lane(lane: Lane, world_size: int | None, data: st.DataObject) -> None:
    matrix = SHIPPED.model_copy(update={"lanes": {"pull-request": lane}})
    plan = make_plan(matrix, Selection(world_size=world_size))
    assert len(set(names(plan))) == len(plan.cells)
    assert_each_command_selects_its_cell(matrix, [data.draw(st.sampled_from(plan.cells))])


def test_a_command_carries_everything_that_made_the_cell(matrix: Matrix, tmp_path: Path) -> None:
    checkout = tmp_path / "a checkout"
    checkout.mkdir()
    (checkout / "pyproject.toml").touch()
    asked = Selection(
        lane="nightly",
        stacks=("new",),
        jobs=("lora",),
        cases=("zero_stage=3,dtype=fp32",),
        replacements=(f"deepspeed={checkout}",),
        world_size=4,
        repeat=("--runtime", "venv"),
    )
    cell = make_plan(matrix, asked).cells[0]
    assert cell.command == (
        "nox -s cpu-zero -- --lane nightly --stack new --job lora"
        " --case zero_stage=3,dtype=fp32,gradient_accumulation_steps=1,world_size=4"
        f" --world-size 4 --with 'deepspeed={checkout}' --runtime venv"
    )
    assert_each_command_selects_its_cell(matrix, [cell])


def test_a_users_adapter_runs_through_the_cases_of_its_job(tmp_path: Path) -> None:
    file = tmp_path / "mine.py"
    file.write_text("class Mine:\n    pass\n", encoding="utf-8")
    plan = make_plan(SHIPPED, Selection(adapter=f"{file}:Mine"))
    assert {cell.job for cell in plan.cells} == {"zero3-custom-adapter"}
    assert {(cell.adapter, cell.ds_config) for cell in plan.cells} == {("mine.py:Mine", None)}
    assert_each_command_selects_its_cell(SHIPPED, plan.cells[:2])
    for asked, says in (
        (Selection(adapter=f"{file}:Mien"), "did you mean Mine"),
        (Selection(adapter=f"{file}:Mine", jobs=("grpo-lora",)), "which --job leaves out"),
        (Selection(adapter=f"{file}:Mine", ds_config=file), "different jobs"),
    ):
        with pytest.raises(UsageError) as caught:
            make_plan(SHIPPED, asked)
        assert says in caught.value.message


@pytest.mark.parametrize(
    ("config", "name"),
    [
        ({}, "zero0-fp32"),
        ({"bf16": {"enabled": True}, "zero_optimization": {"stage": 2}}, "zero2-bf16"),
        ({"bf16": {"enabled": "auto"}, "fp16": {"enabled": "auto"}, "gradient_clipping": "auto"}, "zero0-bf16"),
        ({"gradient_accumulation_steps": 4, "gradient_clipping": 1.0}, "zero0-fp32-gas4-clip-1"),
        ({"optimizer": {"type": "AdamW"}, "bf16": {"enabled": True}}, "zero0-bf16-adamw"),
    ],
)
def test_a_users_configuration_is_a_case(config: Mapping[str, object], name: str, tmp_path: Path) -> None:
    file = tmp_path / "ds.json"
    file.write_text(json.dumps(config), encoding="utf-8")
    plan = make_plan(SHIPPED, Selection(ds_config=file))
    assert names(plan) == [f"cpu/newest/grpo-lora/{name}"]
    assert [(cell.adapter, cell.ds_config) for cell in plan.cells] == [(None, "ds.json")]
    assert_each_command_selects_its_cell(SHIPPED, plan.cells)


@pytest.mark.parametrize(
    ("config", "says"),
    [
        ({"zero_optimization": {"stage": 5}}, "found zero_stage 5; expected one of: 0, 1, 2, 3"),
        ({"fp16": {"enabled": True}}, "found dtype fp16; expected one of: bf16, fp32"),
        ({"optimizer": {"type": "Lamb"}}, "found optimizer lamb"),
        ({"gradient_accumulation_steps": [4]}, "found gradient_accumulation_steps [4]"),
        ({"bf16": True}, "bf16: found True; expected an object"),
    ],
)
def test_a_users_configuration_that_is_no_case(config: Mapping[str, object], says: str, tmp_path: Path) -> None:
    file = tmp_path / "ds.json"
    file.write_text(json.dumps(config), encoding="utf-8")
    with pytest.raises(UsageError) as caught:
        make_plan(SHIPPED, Selection(ds_config=file))
    assert says in caught.value.message
    assert str(file) in caught.value.message


def test_ten_thousand_cells_do_not_grow_worse_than_linearly() -> None:
    """Time is measured in a benchmark; here only that ten times the cells do not cost a hundred times."""
    job: Job = SHIPPED.jobs["grpo-lora"]

    def seconds(accumulations: int) -> float:
        pattern = {"zero_stage": (0, 1, 2, 3), "dtype": ("bf16", "fp32"), "beta": (0, 0.5, 1, 2, 3)}
        lane = Lane(
            stacks=("newest", "stable"),
            cases={"grpo-lora": ({**pattern, "gradient_accumulation_steps": tuple(range(1, accumulations + 1))},)},
        )
        matrix = SHIPPED.model_copy(update={"lanes": {"pull-request": lane}, "jobs": {"grpo-lora": job}})
        start = time.process_time()
        assert len(make_plan(matrix, Selection()).cells) == 80 * accumulations
        return time.process_time() - start

    small, large = min(seconds(12) for _ in range(3)), seconds(125)
    assert large < 40 * small, f"{small:.3f} s for 960 cells, {large:.3f} s for 10000"
    print(f"10000 cells: {large:.2f} s")
