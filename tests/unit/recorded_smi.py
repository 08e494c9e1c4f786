"""Output of nvidia-smi and npu-smi in the shapes that were reported in public, and programs on PATH that print it."""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping
from pathlib import Path

import pytest

# The columns of `nvidia-smi --query-gpu=index,uuid,name,driver_version --format=csv,noheader,nounits`, with the name
# and UUID of influxdata/telegraf#5812 and the driver of akash-network/provider-configs#12.
UUID = "GPU-513536b6-7d19-9063-b049-1e69664bb29{}"
A100 = "{}, " + UUID + ", NVIDIA A100-SXM4-80GB, 535.129.03\n"
ONE_GPU = A100.format(0, 0)
EIGHT_GPUS = "".join(A100.format(n, n) for n in range(8))

# A GPU that fell off the bus: the tool complains once and goes on without it, as nvidia-smi did for
# GPU 0000:CB:00.0 in public reports ("Unable to determine the device handle for GPU...: Unknown Error").
LOST = "Unable to determine the device handle for GPU0000:CB:00.0: Unknown Error\n"
SEVEN_GPUS_ONE_LOST = "".join(A100.format(n, n) for n in range(8) if n != 3) + LOST

# `--query-compute-apps=gpu_uuid,pid,process_name`, columns as in NVIDIA/dcgm-exporter#94.
APP = UUID + ", 1333928, /opt/conda/bin/python\n"

NO_DRIVER = (
    "NVIDIA-SMI has failed because it couldn't communicate with the NVIDIA driver. Make sure that the latest NVIDIA "
    "driver is installed and running.\n"
)

# `npu-smi info` of vllm-project/vllm-ascend#1767 (24.1.0.3, 910B2); its table of processes as in #12980 there.
NPU_HEAD = """\
+------------------------------------------------------------------------------------------------+
| npu-smi 24.1.0.3                 Version: 24.1.0.3                                             |
+---------------------------+---------------+----------------------------------------------------+
| NPU   Name                | Health        | Power(W)    Temp(C)           Hugepages-Usage(page)|
| Chip                      | Bus-Id        | AICore(%)   Memory-Usage(MB)  HBM-Usage(MB)        |
+===========================+===============+====================================================+
"""
NPU_CARD = """\
| {}     910B2               | {}| 96.4        37                0    / 0             |
| 0                         | 0000:C{}:00.0  | 0           0    / 0          3397 / 65536         |
+===========================+===============+====================================================+
"""
NPU_PROCESSES = """\
+---------------------------+---------------+----------------------------------------------------+
| NPU     Chip              | Process id    | Process name             | Process memory(MB)      |
+===========================+===============+====================================================+
"""
NPU_IDLE = """\
| No running processes found in NPU {}                                                            |
+===========================+===============+====================================================+
"""
# The name is empty where the process is in a container.
NPU_BUSY = """\
| {}       0                 | 1333928       |                          | 37709                   |
+===========================+===============+====================================================+
"""

# Two chips a card, each with a number of its own, as on an A3: vllm-project/vllm-ascend#2035.
TWO_CHIPS = """\
+------------------------------------------------------------------------------------------------+
| npu-smi 24.1.rc3.7               Version: 24.1.rc3.7                                           |
+---------------------------+---------------+----------------------------------------------------+
| NPU   Name                | Health        | Power(W)    Temp(C)           Hugepages-Usage(page)|
| Chip  Phy-ID              | Bus-Id        | AICore(%)   Memory-Usage(MB)  HBM-Usage(MB)        |
+===========================+===============+====================================================+
| 1     Ascend910           | OK            | 185.4       36                0    / 0             |
| 0     2                   | 0000:99:00.0  | 0           0    / 0          3415 / 65536         |
+------------------------------------------------------------------------------------------------+
| 1     Ascend910           | OK            | -           36                0    / 0             |
| 1     3                   | 0000:9B:00.0  | 0           0    / 0          3195 / 65536         |
+===========================+===============+====================================================+
+---------------------------+---------------+----------------------------------------------------+
| NPU     Chip              | Process id    | Process name             | Process memory(MB)      |
+===========================+===============+====================================================+
| 1       1                 | 3328327       | python                   | 50119                   |
+===========================+===============+====================================================+
"""


def npus(count: int, *, busy: int | None = None, health: Mapping[int, str] | None = None) -> str:
    """`npu-smi info` of so many 910B2."""
    cards = "".join(NPU_CARD.format(n, (health or {}).get(n, "OK").ljust(14), n) for n in range(count))
    processes = "".join((NPU_BUSY if n == busy else NPU_IDLE).format(n) for n in range(count))
    return NPU_HEAD + cards + NPU_PROCESSES + processes


def put_on_path(folder: Path, patch: pytest.MonkeyPatch, tool: str, answers: Mapping[str, str], code: int = 0) -> None:
    """A program of this name, alone on PATH, that prints the first answer whose key is among its arguments."""
    program = folder / tool
    program.write_text(
        f"#!{sys.executable} -S\nimport sys\nanswers = {json.dumps(dict(answers))}\n"
        "words = ' '.join(sys.argv[1:])\n"
        "print(next((text for key, text in answers.items() if key in words), ''), end='')\n"
        f"sys.exit({code})\n"
    )
    program.chmod(0o755)
    patch.setenv("PATH", str(folder))
