"""`audit`: the formats that training logs come in, what is found in them, and what the ledger answers."""

from __future__ import annotations

import json
import math
import subprocess
import sys
import tracemalloc
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

import pytest
from packaging.specifiers import SpecifierSet

from ci.audit import findings, fold, known
from ci.audit.fold import Run
from ci.audit.look import Audit, look
from ci.audit.read import of_chunks
from ci.audit.records import Raised, Record, Release, Scale, Setting, Step, Unread
from ci.audit.tell import lines
from ci.errors import UsageError
from ci.matrix import Matrix, load

ROOT = Path(__file__).parents[2]

# The two records of modelscope/ms-swift#6815: the same step at ZeRO-0 and at ZeRO-3.
REPORT_A = (1656.27481113, 0.02527279)


@pytest.fixture(scope="module")
def matrix() -> Matrix:
    return load(ROOT / "matrix.yaml")


def read(text: str | bytes) -> list[Record]:
    return list(of_chunks(text.encode() if isinstance(text, str) else text, ()))


def steps(norms: Iterable[float | None], losses: Iterable[float] | None = None) -> Iterator[Step]:
    pairs = zip(norms, losses, strict=False) if losses is not None else ((norm, 1.0) for norm in norms)
    return (Step(number, loss, norm) for number, (norm, loss) in enumerate(pairs, 1))


def found(run: Run, clip: float | None = 0) -> list[str]:
    return [finding.text for finding in findings.of_run(run, 0, "log", clip)]


def of_norms(*norms: float | None) -> list[str]:
    return found(fold.fold(steps(norms)))


# Formats


def test_json_lines_of_ms_swift() -> None:
    text = (
        '{"loss": 0.5, "grad_norm": 1656.25, "learning_rate": 1e-08, "global_step/max_steps": "2/4389"}\n'
        '{"eval_loss": 0.25, "epoch": 1.0, "global_step/max_steps": "2/4389"}\n'
        '{"loss": NaN, "grad_norm": Infinity, "global_step/max_steps": "3/4389", "text": "损失"}\n'
        '{"last_model_checkpoint": null, "log_history": [{"loss": 0.5, "step": 2}]}\n'
        '{"loss": 0.5, "grad_nor'
    )
    one, two, last = read(text)
    assert (one, last) == (Step(2, 0.5, 1656.25), Unread())
    assert isinstance(two, Step) and two.number == 3 and two.grad_norm == math.inf and math.isnan(two.loss or 0)


@pytest.mark.parametrize("indent", [None, 2])
def test_trainer_state_of_transformers(indent: int | None) -> None:
    history = [
        {"epoch": 0.1, "grad_norm": 2.5, "loss": 1.5, "step": 10},
        {"epoch": 0.1, "eval_loss": 1.25, "step": 10},
        {"epoch": 0.2, "grad_norm": math.nan, "loss": 0.5, "note": 'a "}" in {text}', "step": 20},
        {"epoch": 0.2, "train_loss": 1.0, "step": 20},
    ]
    state = {"best_metric": None, "log_history": history, "stateful_callbacks": {"TrainerControl": {"args": {"a": 1}}}}
    first, second = read(json.dumps(state, indent=indent))
    assert first == Step(10, 1.5, 2.5)
    assert isinstance(second, Step) and second.number == 20 and math.isnan(second.grad_norm or 0)


def test_dicts_of_a_terminal() -> None:
    text = (
        "训练开始 {'epoch'}\n"
        "  0%|          | 0/100 [00:00<?, ?it/s]\r  1%|▏         | 1/100 [00:02<03:20,  2.02s/it]\x1b[A\n"
        "\x1b[32m{'loss': 0.0, 'grad_norm': 1656.0, 'global_step/max_steps': '1/100', 'memory(GiB)': 65.89}\x1b[0m\n"
        "{'loss': '0.1234', 'grad_norm': 'nan', 'epoch': '0'}{'loss': 2.0, 'grad_norm': tensor(0.5, device='cuda:0')}\r"
        "{'loss': 1.0, 'grad_norm': np.float64(0.25), 'step': 7}\n"
        "{'eval_loss': 1.0, 'eval_runtime': 2.0}\n"
        "{'loss': 1.5, 'gra"
    )
    first, second, third, fourth, last = read(text)
    assert first == Step(1, 0.0, 1656.0)
    assert isinstance(second, Step) and second[:2] == (None, 0.1234) and math.isnan(second.grad_norm or 0)
    assert (third, fourth, last) == (Step(None, 2.0, 0.5), Step(7, 1.0, 0.25), Unread())


@pytest.mark.parametrize("bar", ["", "  5%|▌         | 5/100 [00:02<03:20]\r"])
def test_a_dict_that_the_terminal_has_wrapped(bar: str) -> None:
    record = "{'loss': 0.125, 'grad_norm': 1656.27481113, 'global_step/max_steps': '1/100'}"
    for width in range(1, len(record)):
        parts = [record[start : start + width] for start in range(0, len(record), width)]
        text = "before\n" + f"\n{bar}".join(parts) + "\nafter\n{'loss': 2.0, 'grad_norm': 3.0}\n"
        assert read(text) == [Step(1, 0.125, 1656.27481113), Step(None, 2.0, 3.0)], width


def test_a_number_that_other_text_cuts_in_two_is_left_out() -> None:
    text = "{'loss': 0.5, 'grad_norm': 16\n [INFO] saving\n56.27, 'step': 3}\n"
    assert read(text) == [Step(3, 0.5, None)]


def test_what_deepspeed_says_of_itself() -> None:
    text = (
        "[2025-11-30 10:00:00,000] [INFO] [logging.py:107:log_dist] [Rank 0] DeepSpeed info: version=0.17.6, git\n"
        "[2025-11-30 10:00:00,000] [INFO] [config.py:957:print]   gradient_clipping ............ 0.5\n"
        "[2025-11-30 10:00:00,000] [INFO] [config.py:957:print]   bfloat16_enabled ............. True\n"
        "[2025-11-30 10:00:00,000] [INFO] [config.py:957:print]   zero_optimization_stage ...... 0\n"
        "[INFO:swift] swift.__version__: 3.10.2\n"
        "- `transformers` version: 4.57.6\n"
        "torch version .................... 2.6.0+cu124\n"
        "[2024-07-17 19:44:06,829] [INFO] [loss_scaler.py:190:update_scale] [deepspeed] OVERFLOW! Rank 0 Skipping step."
        " Attempted loss scale: 65536, but hysteresis is 2. Reducing hysteresis to 1\n"
        "  6%|▋ | 6/1184 [00:21<1:09:10]\r[2021-02-04 15:06:19,825] [INFO] [stage2.py:1357:step] [deepscale] OVERFLOW!"
        " Rank 0 Skipping step. Attempted loss scale: 134217728.0, reducing to 67108864.0\n"
        "[INFO] [fused_optimizer.py:416:_update_scale] Increasing dynamic loss scale from 4.0 to 8.0\n"
        "[INFO] [engine.py:3005:_report_progress] [Rank 0] step=10, skipped=2, lr=[1e-05], mom=[(0.9, 0.999)]\n"
        " iteration     5426/  250000 | lm loss: 1.05E+01 | loss scale: 1.0 | grad norm: nan | TFLOPs: 78.46 |\n"
        "[rank0]: RuntimeError: Function SumBackward0 returned an invalid gradient at index 0\n"
    )
    *told, iteration, raised = read(text)
    assert told == [
        Release("deepspeed", "0.17.6"),
        Setting("gradient_clipping", 0.5),
        Setting("dtype", "bf16"),
        Setting("zero_stage", 0),
        Release("ms-swift", "3.10.2"),
        Release("transformers", "4.57.6"),
        Release("torch", "2.6.0+cu124"),
        Scale(65536, None, True),
        Scale(134217728, 67108864, True),
        Scale(4, 8, False),
    ]
    assert isinstance(iteration, Step) and iteration[:2] == (5426, 10.5) and math.isnan(iteration.grad_norm or 0)
    assert raised == Raised("Function SumBackward0 returned an invalid gradient at index 0")


def test_settings_as_ms_swift_and_deepspeed_print_them() -> None:
    text = (
        "max_grad_norm=1.0,\n"
        "deepspeed={'fp16': {'enabled': 'auto'}, 'zero_optimization': {'stage': 2, 'overlap_comm': False}},\n"
        "torch_dtype=torch.bfloat16,\n"
        '    "gradient_clipping": "auto",\n'
    )
    assert read(text) == [Setting("gradient_clipping", 1.0), Setting("zero_stage", 2), Setting("dtype", "bf16")]


# Findings in one log


def test_nan_and_inf() -> None:
    assert of_norms(1.0, math.nan, math.inf, math.nan) == [
        "log: grad_norm is nan in 2 of 4 records, first at step 2",
        "log: grad_norm is inf in 1 of 4 records, first at step 3",
    ]
    assert found(fold.fold([Step(5, -math.inf, 1.0)])) == ["log: loss is inf in 1 of 1 records, first at step 5"]


def test_no_norm_and_a_norm_of_0() -> None:
    (text,) = of_norms(None, None)
    assert text.startswith("log: none of 2 records has a grad_norm")
    (text,) = of_norms(*[0.0] * 8)
    assert text.startswith("log: grad_norm is 0 in all 8 records")
    assert of_norms(*[0.0] * 7) == []
    assert of_norms(*[0.0] * 8, 0.5) == []


def test_a_norm_that_grows_as_a_sum_of_gradients_does() -> None:
    for power, suspected in ((0.5, True), (1.0, True), (3.0, False)):
        run = fold.fold(steps(0.5 * number**power for number in range(1, 2000)))
        (finding,) = findings.of_run(run, 0, "log", 0)
        exponent = float(finding.text.partition("as step^")[2].partition(";")[0])
        assert exponent == pytest.approx(power, abs=0.02)
        assert bool(finding.suspects) == suspected
    noisy = [0.3 + 0.2 * math.sin(number * 1.7) for number in range(2000)]
    assert of_norms(*noisy) == of_norms(*sorted(noisy, reverse=True)) == []
    assert of_norms(0.1, *[0.5, 0.3] * 20, 0.9) == []  # the ends are apart, and nothing grows between them
    assert of_norms(1.0, 1.37, 1.76) == []  # too few to tell


def test_a_norm_never_below_the_clip() -> None:
    norms = [1656.0 + number % 3 for number in range(20)]
    (text,) = found(fold.fold(steps(norms)), clip=None)
    assert "never below the clip value 1 (assumed" in text and "the least of 20 is 1656" in text
    assert "2^16 it would be 0.0253" in text
    assert found(fold.fold(steps([*norms, 1.0])), clip=None) == []
    assert found(fold.fold(steps(norms)), clip=0) == []
    assert found(fold.fold(steps(norms)), clip=2000) == []
    assert found(fold.fold(steps([999.0] * 7)), clip=None) == []
    assert "the least of 1 is 1656" in found(fold.fold(steps(norms[:1])), clip=None)[0]
    said = fold.fold([Setting("gradient_clipping", 1700.0), *steps(norms)])
    assert found(said, clip=None) == []
    assert "clip value 1.5 (as given)" in found(said, clip=1.5)[0]


def test_a_loss_scale_at_its_minimum() -> None:
    scales = [Scale(2.0**power, 2.0 ** max(0, power - 1), True) for power in range(16, -1, -1)]
    assert found(fold.fold(scales)) == ["log: 17 overflows, and the loss scale has fallen to 1: steps are skipped"]
    assert found(fold.fold(scales[:-2])) == []
    assert found(fold.fold([Scale(1.0, 1.0, False)])) == []


# Findings in two logs


def compared(left: Iterable[Record], right: Iterable[Record]) -> list[str]:
    *_, comparison = fold.compare(left, right)
    return [finding.text for finding in findings.of_comparison(comparison, ("left", "right"))]


def test_norms_apart_by_a_power_of_two() -> None:
    (text,) = compared(steps([REPORT_A[0]], [1.0]), steps([REPORT_A[1]], [2.0]))
    assert text.startswith(
        "norms apart by 2^16: left reports 65535.9 times the norm of right at step 1 (1656.27481 and"
    )
    (text,) = compared(steps([REPORT_A[1]], [1.0]), steps([REPORT_A[0]], [2.0]))
    assert text.startswith(
        "norms apart by 2^16: right reports 65535.9 times the norm of left at step 1 (1656.27481 and"
    )
    (text,) = compared(steps([4.0, 8.01, 2.0], [1, 1, 1]), steps([1.0, 2.0, 1.7], [2, 2, 2]))
    assert "2^2 in 2 of 3 steps" in text and "accumulat" not in text and "a sum over micro-batches" in text


def test_runs_that_drift_apart_after_the_first_step() -> None:
    true = [0.5 + 0.01 * number for number in range(50)]
    other = [65536 * norm * (1 + 0.006 * number) for number, norm in enumerate(true)]
    (text,) = compared(steps(other, [1.0] * 50), steps(true, [2.0] * 50))
    assert text.startswith("norms apart by 2^16") and "2^16 in 1 of 50 steps" in text
    far = [65536 * true[0], *(norm * 3 for norm in true[1:])]
    assert compared(steps(far, [1.0] * 50), steps(true, [2.0] * 50)) == []


def test_norms_apart_by_something_else() -> None:
    for factor in (1.0, 1.01, 3.0, 2**16 * 1.01):
        assert compared(steps([factor], [1.0]), steps([1.0], [2.0])) == [], factor
    assert compared(steps([math.nan, 0.0, math.inf, None, -1.0]), steps([1.0] * 5, [2.0] * 5)) == []


def test_equal_losses_with_different_norms() -> None:
    (text,) = compared(steps([0.43, 0.5], [2.0, 1.9]), steps([0.85, 0.5], [2.0, 1.9]))
    assert "in 1 of 2 steps with equal losses the norms are more than 1% apart, first at step 1: loss 2," in text
    assert "All those losses are 0" not in text
    (text,) = compared(steps([0.43], [0.0]), steps([0.85], [0.0]))
    assert "All those losses are 0" in text
    assert compared(steps([0.43], [2.0]), steps([0.85], [2.1])) == []
    assert compared(steps([0.850], [2.0]), steps([0.852], [2.0])) == []


def test_steps_are_paired_by_number() -> None:
    left = [Step(number, 1.0, 1.0) for number in (1, 2, 5, 6, 3, 4, 7)]
    right = [Step(number, 1.0, 1.0) for number in (2, 4, 6, 7, 8)]
    one, other, comparison = fold.compare(left, right)
    assert (comparison.pairs, one.steps, other.steps) == (3, 7, 5)  # 2, 6 and 7: a log that went back
    *_, comparison = fold.compare(left[:1] * 2 + left[1:2], steps([1.0] * 2))
    assert comparison.pairs == 2  # a step that is logged twice has one pair


def test_logs_without_step_numbers_are_counted() -> None:
    one, _, comparison = fold.compare([Step(None, 1.0, 1.0)] * 3, steps([1.0] * 5))
    assert (comparison.pairs, one.last, one.numbered) == (3, 3, False)


# What is kept


def test_what_is_kept_does_not_grow_with_the_log() -> None:
    def peak(count: int) -> int:
        tracemalloc.start()
        run = fold.fold(steps(1.0 + number % 7 for number in range(count)))
        assert run.steps == count and len(run.course) <= 2 * fold.BLOCKS
        size = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        return size

    assert peak(40_000) < 2 * peak(2_000)


def test_the_course_of_a_long_log_is_that_of_all_its_records() -> None:
    norms = [1.0 + number for number in range(5000)]
    run = fold.fold(steps(norms))
    assert sum(block.count for block in run.course) == 5000
    assert sum(block.count * block.log_norm for block in run.course) == pytest.approx(sum(map(math.log, norms)))
    assert [block.number for block in run.course] == sorted(block.number for block in run.course)


# What the ledger answers


def audited(tmp_path: Path, matrix: Matrix, *texts: str, **pins: str) -> Audit:
    files = []
    for number, text in enumerate(texts):
        files.append(tmp_path / f"{number}.log")
        files[-1].write_text(text, encoding="utf-8")
    return look(files, matrix, {name: SpecifierSet(pin) for name, pin in pins.items()}, None)


def names(audit: Audit) -> list[list[str]]:
    return [[entry.defect.id for entry in answered.entries] for answered in audit.answered]


def test_report_a_is_named(tmp_path: Path, matrix: Matrix) -> None:
    texts = [
        f'{{"loss": 0.0, "grad_norm": {REPORT_A[0]}, "global_step/max_steps": "1/100"}}\n',
        f"{{'loss': 0.0, 'grad_norm': {REPORT_A[1]}, 'global_step/max_steps': '1/100'}}\n",
    ]
    audit = audited(tmp_path, matrix, *texts)
    assert names(audit)[0][0] == "zero0-bf16-norm-times-scale"
    said = "\n".join(lines(audit, matrix))
    assert "1. norms apart by 2^16: " in said and "2. losses equal while norms differ" in said
    assert 'advice: set "fp16": {"enabled": false, "loss_scale": 1}, or use 0.18.6 or newer' in said
    assert "no version of deepspeed is known" in said
    (alone,) = names(audited(tmp_path, matrix, texts[0]))
    assert alone[0] == "zero0-bf16-norm-times-scale"


def test_versions_and_settings_narrow_the_answer(tmp_path: Path, matrix: Matrix) -> None:
    norms = [json.dumps({"loss": 0.5, "grad_norm": norm, "step": 1}) for norm in REPORT_A]
    banner = "[INFO] DeepSpeed info: version=0.17.6, git-hash=unknown\n'stage': 0, bf16=True\n"
    other = banner.replace("0,", "3,")
    first, *_ = names(audited(tmp_path, matrix, banner + norms[0], other + norms[1]))
    assert first == ["zero0-bf16-norm-times-scale"]
    banner = banner.replace("0.17.6", "0.19.8")
    first, *_ = names(audited(tmp_path, matrix, banner + norms[0], other + norms[1]))
    assert first == []
    audit = audited(tmp_path, matrix, banner + norms[0], other + norms[1], deepspeed="==0.18.9")
    assert names(audit)[0] == []
    said = "\n".join(lines(audit, matrix))
    assert "the ledger knows no such defect of this release and these settings; of others: zero0-bf16-norm" in said
    assert "python -m ci advice --versions 'deepspeed==0.18.9'" in said


def test_a_log_cut_down_by_report_b_names_its_defect(tmp_path: Path, matrix: Matrix) -> None:
    message = "Function SumBackward0 returned an invalid gradient at index 0 - got [0] but expected shape compatible"
    audit = audited(tmp_path, matrix, f"Traceback\nRuntimeError: {message} with [12480]\nValueError: nothing known\n")
    (named,) = names(audit)
    assert "zero3-keepalive-after" in named and "zero3-keepalive-after-report-sizes" in named


def test_signatures_that_the_ledger_has(matrix: Matrix) -> None:
    """Each kind of finding that points to the ledger finds something there, in some release."""
    runs = {
        "none": fold.fold(steps([None] * 9)),
        "zero": fold.fold(steps([0.0] * 9)),
        "sum": fold.fold(steps(float(number) for number in range(1, 99))),
        "clip": fold.fold(steps([9.0] * 9)),
        "minimum": fold.fold([Scale(1.0, 1.0, True)]),
    }
    told = {
        name: [
            entry.defect.id for _, signature in finding.suspects for entry in known.entries(matrix, signature, {}, {})
        ]
        for name, run in runs.items()
        for finding in findings.of_run(run, 0, "log", None if name == "clip" else 0)
    }
    assert told["none"] == ["zero0-fp32-norm-none"]
    assert told["zero"] == ["fp16-fused-never-steps", "fp16-fused-never-steps-experts"]
    assert told["sum"][0].startswith("zero0-bf16-")
    assert told["clip"][0] == "zero0-bf16-norm-times-scale"
    assert told["minimum"] == ["zero12-offload-overflow-never-ends"]


def test_nothing_found_says_what_was_looked_at(tmp_path: Path, matrix: Matrix) -> None:
    text = "".join(f"{{'loss': 1.{number}, 'grad_norm': 0.{number + 1}}}\n" for number in (3, 1, 2))
    audit = audited(tmp_path, matrix, text)
    said = "\n".join(lines(audit, matrix))
    assert not audit.answered
    assert "nothing found; looked at: nan and inf, a norm that is missing, 0, growing" in said
    assert "fewer than 8 norms" in said and "3 training records, without step numbers" in said


def test_a_file_that_is_no_log(tmp_path: Path, matrix: Matrix) -> None:
    with pytest.raises(UsageError, match=r"0\.log: found no training record; expected logging\.jsonl"):
        audited(tmp_path, matrix, "沒有\n" * 5)


# Memory


def jsonl(record: str) -> str:
    return record + "\n"


def terminal(record: str) -> str:
    return f"\r  5%|▌| 5/100 [00:02<03:20]\n{record.replace(chr(34), chr(39))}\n训练\n"


def state(record: str) -> str:
    return record.replace(", ", ",\n      ") + ",\n    "


def one_line(record: str) -> str:
    return record.replace("{", " ").replace("}", " ")


@pytest.mark.parametrize("form", [jsonl, terminal, state, one_line])
def test_memory_stays_below_100_mb(form: Callable[[str], str], tmp_path: Path) -> None:
    """A file of 64 MB: were it kept, 100 MB would not do. The limit is the one that a log of any size has."""
    record = json.dumps({"loss": 0.5, "grad_norm": 0.25, **{f"rewards/function {n}/mean": n / 7 for n in range(40)}})
    block = form(record).encode()
    block *= 1 + (1 << 20) // len(block)
    path = tmp_path / "log"
    with path.open("wb") as file:
        file.write(b'{\n  "log_history": [\n    ' if form is state else b"{'loss': 1.0, 'grad_norm': 0.5}\n")
        for _ in range(64):
            file.write(block)
    words = [sys.executable, "-m", "ci", "audit", str(path), "--versions", "deepspeed=0.19.8"]
    script = (
        "import resource, subprocess, sys\n"
        f"done = subprocess.run({words!r}, capture_output=True, text=True)\n"
        "sys.stderr.write(done.stderr)\n"
        "print(done.returncode, resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss, done.stdout.splitlines()[0])"
    )
    # A process between: ru_maxrss is the largest of all children, and this one has had others.
    done = subprocess.run([sys.executable, "-c", script], cwd=ROOT, capture_output=True, text=True, check=True)
    code, kilobytes, said = done.stdout.split(maxsplit=2)
    assert (code, done.stderr) == ("0", "")
    assert int(kilobytes) < 100 * 1024
    assert int(said.split()[1]) == (1 if form is one_line else 64 * (block.count(b"loss")) + (form is not state))
