"""Training records out of what a terminal showed: lines of any kind, among them some that are known.

Known are Python dicts as transformers, TRL and ms-swift print them, wrapped lines and several in a line included; JSON
objects, a line each; Megatron-DeepSpeed's iterations; and what DeepSpeed says about its loss scale, its version and
its configuration, from 0.9 to 0.19. Everything else (progress bars, text in any language) is passed over.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator

from ci.audit.objects import STEP_KEYS, number, parse, training
from ci.audit.records import Raised, Record, Release, Scale, Setting, Step, Unread

WRAPPED = 8192
"""Bytes within which a dict that a terminal has wrapped must end."""

_ANSI = re.compile(rb"\x1b(?:\[[0-?]*[ -/]*[@-~]|\][^\x07\x1b]*(?:\x07|\x1b\\)|[@-Z\\-_])")
_DICT = re.compile(rb"\{'[^{}]*+\}")
_ITEM = re.compile(
    rb"'(loss|grad_norm|%s)': ?(?:'|tensor\(|np\.float\d+\()?([^\s,'{})]+)(?=[,')}])" % "|".join(STEP_KEYS).encode()
)
_BAR = re.compile(rb"\d%\|")

_ITERATION = re.compile(rb"\biteration:? +(\d+)")
_LOSS = re.compile(rb"\bloss: (\S+)")
_NORM = re.compile(rb"\bgrad norm: (\S+)")

_OVERFLOW = re.compile(
    rb"(?i:overflow)!.*?Skipping step\.?(?: Attempt\w+ loss scale: ([\d.e+]+)(?:, reducing to ([\d.e+]+))?)?"
)
_MOVED = re.compile(rb"(?:Reducing|Increasing|setting) (?:dynamic )?loss scale from ([\d.e+]+) (?:to|->) ([\d.e+]+)")
_STATIC = re.compile(rb"static loss scale of:? ([\d.e+]+)")
_RELEASE = re.compile(
    rb"(?i)(?<![\w/-])(deepspeed|transformers|accelerate|trl|peft|(?:py)?torch|ms-swift|swift)`?"
    rb"(?: info|[ .]*_*version_*(?: \(GPU\?\))?)?(?:[ .]*[:=]+ ?| \.{3,} ?| {2,})(?:version=)?v?(\d+\.\d[\w.+!]*)"
)
_PACKAGES = {"pytorch": "torch", "swift": "ms-swift"}
_CLIP = re.compile(rb"\b(?:gradient_clipping|max_grad_norm)['\"]?\s*(?:[:=]|\.{2,})\s*(\d[\d.e+-]*)")
_STAGE = re.compile(rb"(?:\bzero_optimization_stage[ .]+|['\"]stage['\"]\s*:\s*|\bzero_config[ .]+stage=)([0-3])\b")
_DTYPE = re.compile(
    rb"\b(?:(b)float16_(?:enabled|config)[ .]+(?:enabled=)?True|(?:fp16_enabled|float16_config)[ .]+(?:enabled=)?True"
    rb"|(b)f16=True|fp16=True|torch_dtype=torch\.(?:(b)float16|float16))"
)
_RAISED = re.compile(rb"(?:^|[\s:])(?:\w+\.)*\w*(?:Error|Exception): (.+)")


def lines(found: Iterable[bytes]) -> Iterator[Record]:
    """The records of a log, in its order."""
    wrapped = _Wrapped()
    for line in found:
        if line.startswith(b'{"'):
            record = parse(line)
            if record is not None:
                yield record
            continue
        ended, line = wrapped.take(_ANSI.sub(b"", line) if b"\x1b" in line else line)
        yield from _dicts(ended)
        steps = list(_dicts(line))
        yield from steps
        if not steps and line:
            yield from _told(line)
    yield from _dicts(wrapped.held)


class _Wrapped:
    """Puts a dict together that a terminal has wrapped; held: what there is of one that has not ended."""

    def __init__(self) -> None:
        self.held = b""

    def take(self, line: bytes) -> tuple[bytes, bytes]:
        """(The dict that ends in this line or, where there will be no more of it, its beginning; what else it has)."""
        ended = b""
        begun = len(line) - 1 if line.endswith(b"{") else line.rfind(b"{'")
        if self.held and (begun >= 0 or not _BAR.search(line)):
            opened, closed = line.find(b"{'"), line.find(b"}")
            if closed >= 0 and not 0 <= opened < closed:
                ended, self.held = self.held + line[: closed + 1], b""
            elif begun >= 0 or len(self.held) + len(line) > WRAPPED:
                ended, self.held = self.held, b""
            else:
                self.held += line
        if begun >= 0 and line.find(b"}", begun) < 0:
            line, self.held = line[:begun], line[begun : begun + WRAPPED]
        return ended, line


def _dicts(line: bytes) -> Iterator[Step | Unread]:
    if b"{'" not in line:
        return
    complete = False
    for match in _DICT.finditer(line):
        complete = True
        items = {key.decode(): value.decode("ascii", "replace") for key, value in _ITEM.findall(match[0])}
        record = training(items)
        if record is not None:
            yield record
    if not complete and (b"'loss'" in line or b"'grad_norm'" in line):
        yield Unread()


def _told(line: bytes) -> Iterator[Record]:
    for needle, told in _TOLD:
        if needle in line:
            yield from told(line)


def _iteration(line: bytes) -> Iterator[Record]:
    step, loss, norm = _ITERATION.search(line), _LOSS.search(line), _NORM.search(line)
    if norm:
        yield Step(
            int(step[1][:18]) if step else None,
            number(loss[1].decode("ascii", "replace")) if loss else None,
            number(norm[1].decode("ascii", "replace")),
        )


def _scale(line: bytes) -> Iterator[Record]:
    if moved := _MOVED.search(line):
        yield Scale(_value(moved[1]), _value(moved[2]), False)
    elif static := _STATIC.search(line):
        yield Scale(_value(static[1]), _value(static[1]), False)


def _overflow(line: bytes) -> Iterator[Record]:
    if skipped := _OVERFLOW.search(line):
        yield Scale(_value(skipped[1]), _value(skipped[2]), True)


def _value(text: bytes | None) -> float | None:
    return None if text is None else number(text.decode("ascii", "replace").rstrip(".,"))


def _release(line: bytes) -> Iterator[Record]:
    for match in _RELEASE.finditer(line):
        name = match[1].decode().lower()
        yield Release(_PACKAGES.get(name, name), match[2].decode().rstrip("."))


def _clip(line: bytes) -> Iterator[Record]:
    if match := _CLIP.search(line):
        value = _value(match[1])
        if value is not None:
            yield Setting("gradient_clipping", value)


def _stage(line: bytes) -> Iterator[Record]:
    if match := _STAGE.search(line):
        yield Setting("zero_stage", int(match[1]))


def _dtype(line: bytes) -> Iterator[Record]:
    if match := _DTYPE.search(line):
        yield Setting("dtype", "bf16" if any(match.groups()) else "fp16")


def _raised(line: bytes) -> Iterator[Record]:
    if match := _RAISED.search(line):
        yield Raised(match[1][:2000].decode("utf-8", "replace").strip())


_TOLD: tuple[tuple[bytes, Callable[[bytes], Iterator[Record]]], ...] = (
    (b"grad norm: ", _iteration),
    (b"loss scale", _scale),
    (b"Skipping step", _overflow),
    (b"ersion", _release),
    (b"==", _release),
    (b"eepspeed", _release),
    (b"clipping", _clip),
    (b"max_grad_norm", _clip),
    (b"stage", _stage),
    (b"16", _dtype),
    (b"Error: ", _raised),
    (b"Exception: ", _raised),
)
"""What a line is asked for, where it has the word; looking for a word costs next to nothing."""
