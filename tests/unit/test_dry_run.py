"""What `--dry-run` prints for devices is the vendor's own command, word for word, on a host that has neither."""

from __future__ import annotations

import os
import shlex
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

ROOT = Path(__file__).parents[2]

# As the documentation of Ascend's images has it (installation guide of vllm-ascend), for two cards.
OFFICIAL_NPU = """
docker run --rm
    --device /dev/davinci0 --device /dev/davinci1
    --device /dev/davinci_manager --device /dev/devmm_svm --device /dev/hisi_hdc
    -v /usr/local/dcmi:/usr/local/dcmi
    -v /usr/local/bin/npu-smi:/usr/local/bin/npu-smi
    -v /usr/local/Ascend/driver/lib64/:/usr/local/Ascend/driver/lib64/
    -v /usr/local/Ascend/driver/version.info:/usr/local/Ascend/driver/version.info
    -v /etc/ascend_install.info:/etc/ascend_install.info
"""
# As NVIDIA's container toolkit has it, for two GPUs.
OFFICIAL_CUDA = "docker run --rm --gpus '\"device=0,1\"'"

OURS = ("/project/tests", "/project/order.json", "/project/ci/corrections", "/results", "/pycache")


def printed(backend: str) -> list[str]:
    """The words of the `docker run` that the command prints; no engine answers."""
    command = [sys.executable, "-m", "ci", "run", "--backend", backend, "--dry-run", "--devices", "0,1"]
    environment = {**os.environ, "DOCKER_HOST": "unix:///nowhere.sock", "COLUMNS": "80"}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    (line,) = [line for line in done.stdout.splitlines() if ": docker run " in line]
    return shlex.split(line.partition(": ")[2])


def options(words: Sequence[str], *names: str) -> list[str]:
    """The values of these options, in order."""
    return [words[index + 1] for index, word in enumerate(words[:-1]) if word in names]


def as_mounts(binds: Sequence[str]) -> list[str]:
    """`-v A:B` in the words of --mount: never -v, which makes a folder of a file that is missing."""
    pairs = (bind.split(":") for bind in binds)
    return [f"type=bind,source={source},target={target},readonly" for source, target in pairs]


def test_npu_zero_prints_the_official_flags() -> None:
    words, official = printed("npu"), shlex.split(OFFICIAL_NPU)
    assert options(words, "--device") == options(official, "--device")
    ours = [mount for mount in options(words, "--mount") if not any(f"target={place}" in mount for place in OURS)]
    assert ours == as_mounts(options(official, "-v"))
    assert not {"-v", "--volume", "--privileged", "--entrypoint"} & set(words)
    assert words.index("/opt/stack/bin/python") == 1 + next(
        index for index, word in enumerate(words) if word.startswith("zero-regression-matrix/npu:newest-npu-")
    )


def test_cuda_zero_prints_the_official_flags() -> None:
    words, official = printed("cuda"), shlex.split(OFFICIAL_CUDA)
    assert options(words, "--gpus") == options(official, "--gpus") == ['"device=0,1"']
    assert options(words, "--device") == []
