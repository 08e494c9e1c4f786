"""A matrix.yaml that fits on a page, for tests that change one line of it."""

from __future__ import annotations

from pathlib import Path

TEXT = """\
schema: 1
package_indexes:
  torch_cpu: {url: "https://example.org/whl", variable: CI_TORCH_INDEX}
backends:
  cpu: {accelerator: cpu, communication: gloo, start_method: forkserver, package_index: torch_cpu}
  npu: {accelerator: npu, communication: hccl, start_method: spawn, unavailable: no image yet}
stacks:
  new:
    backend: cpu
    about: new releases
    python: "3.11"
    lock: docker/locks/new.txt
    pins: {deepspeed: 0.19.8, torch: 2.13.0+cpu, trl: 1.16.0}
  old:
    backend: cpu
    about: old releases
    python: "3.11"
    lock: docker/locks/old.txt
    pins: {deepspeed: 0.15.4, torch: 2.13.0+cpu, trl: 0.15.2}
    why: {trl: an example of a pin with a reason}
  on-npu:
    backend: npu
    about: another backend
    python: "3.11"
    lock: docker/locks/on-npu.txt
    pins: {deepspeed: 0.18.9}
lanes:
  nightly:
    stacks: [new, old]
    cases:
      adapter:
        - {user_code: [plain, keepalive]}
      lora:
        - {zero_stage: [0, 1, 2, 3], dtype: [bf16, fp32], gradient_accumulation_steps: [1, 4]}
        - {zero_stage: 0, dtype: bf16, world_size: [1, 2, 4]}
        - {trainer: trl, zero_stage: [0, 3], dtype: bf16, gradient_clipping: [unset, 0.5, binding]}
    exclude:
      lora:
        - {where: {zero_stage: 1, dtype: fp32}, reason: an example}
  pull-request:
    stacks: [new]
    cases:
      adapter:
        - {user_code: keepalive}
      lora:
        - {zero_stage: [0, 2], dtype: bf16, gradient_accumulation_steps: [1, 4]}
        - {trainer: trl, zero_stage: 0, dtype: bf16}
jobs:
  adapter:
    about: an adapter
    requires: {deepspeed: ">=0.14.4"}
    timeout_s: 60
    keys:
      zero_stage: {default: 3, values: [2, 3]}
      dtype: {default: fp32, values: [fp32]}
      user_code: {values: [plain, keepalive]}
      frozen: {default: false, values: [false, true]}
    exclude:
      - {where: {user_code: keepalive, frozen: true}, reason: nothing to keep alive}
  lora:
    about: lora
    requires: {deepspeed: ">=0.14.4"}
    case_requires:
      - {where: {trainer: trl}, requires: {trl: ">=0.17"}, reason: bnpo}
    timeout_s: 90
    keys:
      trainer: {default: engine, values: [engine, trl]}
      zero_stage: {values: [0, 1, 2, 3]}
      dtype: {values: [bf16, fp32]}
      gradient_accumulation_steps: {default: 1, values: integer}
      gradient_clipping: {default: unset, values: [unset, binding, number]}
      optimizer: {default: sgd, values: [sgd, adamw], default_when: [{where: {trainer: trl}, value: adamw}]}
      world_size: {default: 2, values: integer}
tolerances:
  - stages: [0, 1, 2, 3]
    dtype: bf16
    gradient_accumulation_steps: [1]
    checks:
      forward: {tolerance: 4e-3, largest: 1e-3, repeats: 30}
  - job: lora
    stages: [0]
    dtype: bf16
    gradient_accumulation_steps: [1]
    checks: {forward: {tolerance: 0.5, largest: 0, repeats: 30}}
defects:
  - id: a-norm
    title: a norm
    upstream: [owner/name#1]
    where: {job: lora, zero_stage: 0, optimizer: not-adamw}
    affects: {deepspeed: ">=0.15,<0.16"}
    symptom: {reported_norm: {times: loss_scale}}
    advice: use another release
  - id: b-raise
    title: an exception
    upstream: []
    where: {user_code: keepalive}
    affects: {deepspeed: ">=0.14"}
    symptom: {raises: 'got \\[0\\]', steps: first}
    correction: fix_b
    advice: write something else
"""


def write(folder: Path, old: str = "", new: str = "", text: str = TEXT) -> Path:
    """matrix.yaml in `folder`, with one text replaced, and the file of its correction beside it."""
    assert old in text, f"{old!r} is not in the small matrix"
    corrections = folder / "ci" / "corrections"
    corrections.mkdir(parents=True, exist_ok=True)
    (corrections / "fix_b.py").touch()
    path = folder / "matrix.yaml"
    path.write_text(text.replace(old, new, 1), encoding="utf-8")
    return path


def line_of(text: str) -> int:
    """The line on which a text of the small matrix starts."""
    return TEXT[: TEXT.index(text)].count("\n") + 1
