"""matrix.yaml is read whole or refused with the file, the line, what was found and what was expected."""

from __future__ import annotations

from pathlib import Path

import pytest

from ci.errors import ExitCode, MatrixError
from ci.matrix import Scalar, load
from tests.unit.small_matrix import TEXT, line_of, write

LORA = "- {zero_stage: [0, 2], dtype: bf16, gradient_accumulation_steps: [1, 4]}"

# (what is replaced, by what, found, expected): the line is that of what is replaced. One mistake a line reads best.
MISTAKES = {
    "unknown field": ("about: new releases", "abuot: new releases", "`abuot`", "did you mean `about`?"),
    "field too many": ("why: {trl: an", "sizes: {trl: an", "`sizes`", "no such field here"),
    "version as a number": ("deepspeed: 0.19.8", "deepspeed: 0.19", "0.19", "string"),
    "python as a number": ('python: "3.11"', "python: 3.11", "3.11", "string"),
    "pin is a range": ("deepspeed: 0.19.8", 'deepspeed: ">=0.19"', "'>=0.19'", "one exact version"),
    "start method": ("start_method: forkserver", "start_method: fork", "'fork'", "'forkserver' or 'spawn'"),
    "specifier": (
        'affects: {deepspeed: ">=0.15,<0.16"}', "affects: {deepspeed: 0.15 to 0.16}",
        "0.15 to 0.16", "PEP 440",
    ),
    "no affects": ('affects: {deepspeed: ">=0.15,<0.16"}', "affects: {}", "{}", "at least one package"),
    "regex": ("got \\[0\\]", "got [0", "got [0", "regular expression"),
    "steps": ("steps: first", "steps: second", "'second'", "from:"),
    "factor": ("times: loss_scale", "times: scale", "'scale'", "loss_scale"),
    "empty effect": ("{times: loss_scale}", "{}", "{}", "`equals`, `times` or both"),
    "two kinds of symptom": (
        "{raises:", "{update: {times: 2}, raises:",
        "raises", "either effects on checks or `raises`",
    ),
    "tolerance below the largest error": (
        "tolerance: 4e-3", "tolerance: 1e-4",
        "0.0001", "above the largest clean error",
    ),
    "unknown check": ("forward: {tolerance: 4e-3", "foward: {tolerance: 4e-3", "'foward'", "'forward'"),
    "duplicate key": ("    lock: docker/locks/new.txt", "    about: again", "duplicate key", "YAML"),
    "not YAML": ("schema: 1", "schema: [1", "expected ',' or ']'", "YAML"),
    "stacks unsorted": ("  new:\n", "  zz:\n", "'old' after 'zz'", "sorted by id"),
    "defects unsorted": ("id: a-norm", "id: c-norm", "'b-raise' after 'c-norm'", "sorted by id"),
    "defect twice": ("id: a-norm", "id: b-raise", "'b-raise' a second time", "each id once"),
    "backend's index": (
        "package_index: torch_cpu", "package_index: torch_gpu",
        "'torch_gpu'", "did you mean torch_cpu",
    ),
    "stack's backend": ("backend: cpu\n    about: new", "backend: gpu\n    about: new", "unknown backend 'gpu'", "cpu"),
    "stack named current": ("  new:\n", "  current:\n", "'current'", "another id"),
    "pin's name": (
        "pins: {deepspeed: 0.18.9}", "pins: {deepspeed: 0.18.9, Torch_NPU: 2.9.0}",
        "'Torch_NPU'", "'torch-npu'",
    ),
    "forced without a pin": (
        "why: {trl: an", "forced: [tlr]\n    why: {trl: an",
        "unknown pin 'tlr'", "did you mean trl",
    ),
    "forced without a reason": (
        "why: {trl: an", "forced: [deepspeed]\n    why: {trl: an",
        "'deepspeed'", "its reason: `why: {deepspeed: ...}`",
    ),
    "stack's lane": (
        "why: {trl: an", "lane: nightlt\n    why: {trl: an",
        "unknown lane 'nightlt'", "did you mean nightly",
    ),
    "reason without a pin": ("why: {trl:", "why: {tlr:", "unknown pin 'tlr'", "did you mean trl"),
    "lane's stack": ("stacks: [new]", "stacks: [newer]", "unknown stack 'newer'", "did you mean new?"),
    "lane's job": (
        "adapter:\n        - {user_code: keepalive}", "adaptor:\n        - {user_code: plain}",
        "'adaptor'", "adapter",
    ),
    "lane's key": (LORA, LORA.replace("zero_stage", "zero"), "unknown case key 'zero'", "did you mean zero_stage"),
    "lane's value": (LORA, LORA.replace("bf16", "fp8"), "dtype 'fp8'", "bf16, fp32"),
    "lane's value of another type": (LORA, LORA.replace("[1, 4]", "true"), "'true'", "integer"),
    "zero accumulation": (LORA, LORA.replace("[1, 4]", "0"), "'0'", "integer"),
    "negation in a lane": (LORA, LORA.replace("bf16", "not-bf16"), "'not-bf16'", "bf16, fp32"),
    "lane's case without a key": (LORA, LORA.replace(", dtype: bf16", ""), "no dtype", "it has no default"),
    "case that the job excludes": (
        "- {user_code: keepalive}", "- {user_code: keepalive, frozen: true}",
        "only cases", "keep",
    ),
    "lane's exclusion": ("{where: {zero_stage: 1, dtype", "{where: {zero_stage: 5, dtype", "'5'", "0, 1, 2, 3"),
    "job's key": (
        "frozen: {default: false", "frosen: {default: false",
        "unknown case key 'frosen'", "did you mean frozen",
    ),
    "default": ("world_size: {default: 2", "world_size: {default: two", "'two'", "integer"),
    "value unfit for an id": ("user_code: {values: [plain,", "user_code: {values: [plain/er,", "'plain/er'", "in ids"),
    "default that looks ahead": (
        "where: {trainer: trl}, value", "where: {world_size: 2}, value",
        "before this one 'world_size'", "known",
    ),
    "conditional default": ("value: adamw", "value: adam", "'adam'", "sgd, adamw"),
    "job's package": (
        'requires: {deepspeed: ">=0.14.4"}', 'requires: {deepsped: ">=0.14.4"}',
        "'deepsped'", "deepspeed",
    ),
    "tolerance's job": ("job: lora\n", "job: loar\n", "unknown job 'loar'", "did you mean lora"),
    "tolerance's stage": ("stages: [0]\n", "stages: [7]\n", "zero_stage '7'", "0, 1, 2, 3"),
    "defect's job": ("where: {job: lora,", "where: {job: loar,", "unknown job 'loar'", "did you mean lora"),
    "defect's key": (
        "where: {job: lora, zero_stage", "where: {job: lora, stage",
        "unknown case key 'stage'", "zero_stage",
    ),
    "defect's value": ("optimizer: not-adamw", "optimizer: not-adam", "'not-adam'", "sgd, adamw"),
    "defect's value of another job": ("where: {job: lora,", "where: {job: adapter,", "zero_stage '0'", "one of: 2, 3"),
    "defect's key of another job": (
        "where: {job: lora, zero_stage: 0", "where: {job: adapter, zero_stage: 2",
        "'optimizer'", "frozen",
    ),
    "defect's keys of two jobs": (
        "    where: {user_code:", "    where: {optimizer: sgd, user_code:",
        "optimizer, user_code", "one job",
    ),
    "defect's package": (
        'affects: {deepspeed: ">=0.14"}', 'affects: {deepspped: ">=0.14"}',
        "'deepspped'", "deepspeed",
    ),
    "correction's file": ("correction: fix_b", "correction: fix_c", "'fix_c'", "ci/corrections/fix_c.py"),
}  # fmt: skip

# Where the mistake shows somewhere else than in the text that was changed.
ELSEWHERE = {
    "not YAML": "package_indexes:",
    "stacks unsorted": "  old:\n",
    "defects unsorted": "id: b-raise",
    "defect twice": "id: b-raise",
    "defect's keys of two jobs": "where: {user_code: keepalive}\n",
}


@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_mistake_is_answered_with_its_line(mistake: str, tmp_path: Path) -> None:
    old, new, found, expected = MISTAKES[mistake]
    path = write(tmp_path, old, new)
    with pytest.raises(MatrixError) as caught:
        load(path)
    error = caught.value
    at = ELSEWHERE.get(mistake, old.lstrip())
    assert error.exit_code == ExitCode.USAGE
    assert (error.file, error.line) == (path, line_of(at)), error.message
    assert found in error.found, error.message
    assert expected in error.expected, error.message
    assert f"{path}:{error.line}" in error.message


def test_a_missing_field_names_it(tmp_path: Path) -> None:
    with pytest.raises(MatrixError, match=r"matrix\.yaml:\d+: stacks\.new: found nothing; expected the field `lock`"):
        load(write(tmp_path, "    lock: docker/locks/new.txt\n", ""))


def test_two_tolerances_for_one_check(tmp_path: Path) -> None:
    with pytest.raises(MatrixError, match="a second tolerance for forward of zero_stage 0, bf16, accumulation 1"):
        load(write(tmp_path, "- job: lora\n    stages", "- stages"))


def test_two_cases_with_one_name(tmp_path: Path) -> None:
    keys = "world_size: {default: 2, values: integer}\n"
    text = TEXT.replace(keys, keys + "      path: {default: direct, values: [direct, adamw]}\n")
    both = "- {zero_stage: 0, dtype: bf16, optimizer: adamw}\n        - {zero_stage: 0, dtype: bf16, path: adamw}"
    with pytest.raises(
        MatrixError, match="found two cases with the id zero0-bf16-adamw; expected one name for one case"
    ):
        load(write(tmp_path, LORA, both, text))


def test_every_key_with_a_default_leaves_a_case_without_a_name(tmp_path: Path) -> None:
    with pytest.raises(MatrixError, match="a default for every key"):
        load(write(tmp_path, "user_code: {values:", "user_code: {default: plain, values:"))


@pytest.mark.parametrize(
    ("content", "found"),
    [
        (None, "no such file"),
        (b"\xff\xfe\x00", "utf-8"),
        (b"", "None"),
        (b"- 1", "[1]"),
        (b"a: b", "`a`"),
        (b"schema: 1", "nothing"),
        (b"&a {b: *a}", "an entry that contains itself"),
        (b"[" * 1000, "brackets in brackets without an end"),
        (b"a: !!set b", "what no reader can make sense of"),
        (b"a: \x00", "the character #x0000"),
    ],
)
def test_no_matrix_at_all(content: bytes | None, found: str, tmp_path: Path) -> None:
    path = tmp_path / "matrix.yaml"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(MatrixError) as caught:
        load(path)
    assert found in caught.value.found
    assert str(path) in caught.value.message


def test_what_was_read(tmp_path: Path) -> None:
    matrix = load(write(tmp_path))
    assert matrix.stacks["new"].pins["deepspeed"] == "0.19.8"
    assert matrix.tolerances[0].checks["forward"].tolerance == 0.004  # YAML 1.1 would read 4e-3 as a string
    assert matrix.defects[1].symptom.raises == r"got \[0\]"
    assert list(matrix.defects[0].symptom.effects) == ["reported_norm"]


def test_a_tolerance_written_for_a_job_wins(tmp_path: Path) -> None:
    matrix = load(write(tmp_path))
    case: dict[str, Scalar] = {"zero_stage": 0, "dtype": "bf16", "gradient_accumulation_steps": 1}

    def forward(job: str, **changed: Scalar) -> float | None:
        found = matrix.tolerances_for(job, {**case, **changed})
        return found["forward"].tolerance if found else None

    assert forward("lora") == 0.5
    assert forward("adapter") == 0.004
    assert forward("lora", zero_stage=2) == 0.004
    assert forward("lora", dtype="fp32") is None


def test_a_tolerance_written_for_a_trainer_wins_over_that_of_its_job_and_never_another_trainers(tmp_path: Path) -> None:
    group = "  - {job: lora, trainers: [trl], stages: [0], dtype: bf16, gradient_accumulation_steps: [1], "
    checks = "checks: {forward: {tolerance: 0.7, largest: 0, repeats: 30}}}\n"
    # First in the file: the order written must not decide.
    matrix = load(write(tmp_path, "tolerances:\n", "tolerances:\n" + group + checks))
    case: dict[str, Scalar] = {"zero_stage": 0, "dtype": "bf16", "gradient_accumulation_steps": 1}
    found = {
        trainer: matrix.tolerances_for("lora", {**case, "trainer": trainer})["forward"].tolerance
        for trainer in ("engine", "trl", "ms-swift")
    }
    assert found == {"engine": 0.5, "trl": 0.7, "ms-swift": 0.5}
    assert matrix.tolerances_for("lora", case)["forward"].tolerance == 0.5


def test_an_accumulation_that_was_not_measured_has_the_tolerances_of_the_next_larger_else_of_the_largest(
    tmp_path: Path,
) -> None:
    group = "  - {job: lora, stages: [0], dtype: bf16, gradient_accumulation_steps: [%d], checks: {forward: %s}}\n"
    check = "{tolerance: %s, largest: 0, repeats: 30}"
    more = "".join(group % (steps, check % value) for steps, value in ((8, "0.8"), (4, "0.4")))
    matrix = load(write(tmp_path, "tolerances:\n", "tolerances:\n" + more))

    def forward(job: str, steps: int, stage: int = 0) -> float:
        case: dict[str, Scalar] = {"zero_stage": stage, "dtype": "bf16", "gradient_accumulation_steps": steps}
        return matrix.tolerances_for(job, case)["forward"].tolerance

    found = {steps: forward("lora", steps) for steps in (1, 2, 4, 5, 8, 9)}
    assert found == {1: 0.5, 2: 0.4, 4: 0.4, 5: 0.8, 8: 0.8, 9: 0.8}
    # Never another job's or another stage's.
    assert forward("adapter", 2) == forward("lora", 2, stage=1) == 0.004


def test_the_matrix_cannot_be_changed_after_loading(tmp_path: Path) -> None:
    matrix = load(write(tmp_path))
    with pytest.raises(ValueError, match="frozen"):
        matrix.stacks["new"].backend = "npu"


def test_the_small_matrix_is_not_one_of_the_mistakes(tmp_path: Path) -> None:
    assert list(load(write(tmp_path)).stacks) == ["new", "old", "on-npu"]
    assert TEXT.startswith("schema: 1")
