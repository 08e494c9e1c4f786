"""The three jobs on a machine with a GPU, as it is: its Python, torch and driver, no network, wheels carried along.

    python docs/evidence/gpu.py pack WHEELS          # on a machine with a network; at most 64 MB
    python docs/evidence/gpu.py run WHEELS RESULTS   # there, in a copy of this project, with the Python that has torch

What the machine has stays as it is; what it lacks is installed from WHEELS into a virtual environment under RESULTS.
With one device the world size is 1. `--backend cpu` tries the same without a GPU.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import os
import re
import subprocess
import sys
import sysconfig
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
LIMIT_MB = 64
LOCKS = ("docker/locks/newest-cuda.txt", "ci/requirements/host.txt")
LEFT_HERE = ("torch", "triton", "nvidia-", "cuda-", "uv", "pip")
"""What a machine with torch has, and what only other commands need."""
TOO_LARGE = ("pyarrow", "pandas", "datasets", "trl", "hf-xet")
"""Cases through TRL's trainer run only where the machine has TRL and datasets."""
SOURCE = "deepspeed"
"""Published as source: carried as a wheel without its operators, which is the same for every machine."""
QUIET = ("-m", "pip", "--quiet", "--disable-pip-version-check")


def entries() -> dict[str, str]:
    """Name -> entry, with hashes, of each package to carry; where both locks have one, the stack's."""
    found: dict[str, str] = {}
    for lock in LOCKS:
        for entry in re.split(r"\n(?=[A-Za-z0-9])", "\n" + (ROOT / lock).read_text(encoding="utf-8")):
            name = re.match(r"\s*([A-Za-z0-9._-]+)==", entry)
            if name and not name[1].startswith(LEFT_HERE) and name[1] not in TOO_LARGE:
                found.setdefault(name[1], re.sub(r"\n\s*#.*", "", entry).strip())
    return found


def canonical(name: str) -> str:
    """A distribution's name as the index has it."""
    return re.sub(r"[-_.]+", "-", name).lower()


def pack(wheels: Path, version: str) -> None:
    """Download by the locks' hashes, for this version of Python on Linux x86_64, what a machine may lack."""
    wheels.mkdir(parents=True, exist_ok=True)
    packages = entries()
    source = packages.pop(SOURCE)
    platforms = [f"--platform=manylinux_2_{glibc}_x86_64" for glibc in (28, 27, 24, 17, 12, 5)]
    for text, command, environment in (
        (
            "\n".join(packages.values()),
            ["download", "--only-binary=:all:", f"--python-version={version}", *platforms, "--dest"],
            {},
        ),
        (source, ["wheel", "--wheel-dir"], {"DS_BUILD_OPS": "0", "DS_ACCELERATOR": "cpu"}),
    ):
        wanted = wheels / "wanted.txt"
        wanted.write_text(text + "\n", encoding="utf-8")
        words = [sys.executable, *QUIET, *command, str(wheels), "--no-deps", "--require-hashes", "-r", str(wanted)]
        subprocess.run(words, check=True, env={**os.environ, **environment})
        wanted.unlink()
    size = sum(path.stat().st_size for path in wheels.iterdir()) / 1e6
    if size > LIMIT_MB:
        raise SystemExit(f"{wheels}: {size:.1f} MB, at most {LIMIT_MB} MB may be carried")
    print(f"{wheels}: {size:.1f} MB, {len(list(wheels.iterdir()))} wheels")


def install(wheels: Path, place: Path) -> Path:
    """A virtual environment that sees what this interpreter has, with what that lacks from the wheels."""
    subprocess.run([sys.executable, "-m", "venv", str(place)], check=True)
    python = place / "bin" / "python"
    paths = sysconfig.get_paths(vars={"base": str(place), "platbase": str(place)})
    seen = [
        path
        for path in sys.path
        if path and Path(path).is_dir() and Path(path).name in ("site-packages", "dist-packages")
    ]
    Path(paths["purelib"], "machine.pth").write_text("\n".join(seen) + "\n", encoding="utf-8")
    here = {canonical(found.metadata["Name"] or "") for found in importlib.metadata.distributions()}
    missing = sorted({canonical(wheel.name.split("-")[0]) for wheel in wheels.glob("*.whl")} - here)
    print(f"{len(missing)} packages from {wheels}: {', '.join(missing)}", flush=True)
    command = [str(python), *QUIET, "install", "--no-index", "--no-deps", "--find-links", str(wheels), *missing]
    if missing:
        subprocess.run(command, check=True)
    return python


def devices(python: Path, backend: str) -> int:
    """How many devices the machine's own torch sees; 2 on a CPU, where ranks need none."""
    if backend == "cpu":
        return 2
    asked = [str(python), "-c", f"import torch; print(torch.{backend}.device_count())"]
    return int(subprocess.run(asked, check=True, capture_output=True, text=True).stdout.split()[-1])


def run(wheels: Path, results: Path, backend: str) -> int:
    """The jobs through the engine, and what TRL's trainer adds where it is installed; the exit code of `ci run`."""
    results.mkdir(parents=True, exist_ok=True)
    python = install(wheels.resolve(), results.resolve() / "venv")
    count = devices(python, backend)
    if not count:
        print(f"torch sees no device of {backend}: nothing to run")
        return 3
    command = [str(python), "-m", "ci", "run", "--backend", backend, "--runtime", "host", "--python", str(python)]
    command += ["--stack", "current", "--world-size", str(min(count, 2)), "--out", str(results.resolve())]
    has_trl = (
        subprocess.run([str(python), "-c", "import trl, datasets"], check=False, capture_output=True).returncode == 0
    )
    grpo = ["--job", "grpo-lora", *([] if has_trl else ["--case", "trainer=engine"])]
    others = ["--job", "zero3-custom-adapter", "--job", "fp16-optimizers"]
    return max(subprocess.run([*command, *jobs], cwd=ROOT, check=False).returncode for jobs in (grpo, others))


def main() -> int:
    """One of the two halves."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    halves = parser.add_subparsers(dest="half", required=True)
    packing, running = halves.add_parser("pack"), halves.add_parser("run")
    packing.add_argument("--python-version", default="3.11", help="of the machine with the GPU")
    running.add_argument("--backend", default="cuda", choices=("cuda", "npu", "cpu"))
    for half in (packing, running):
        half.add_argument("wheels", type=Path)
    running.add_argument("results", type=Path)
    given = parser.parse_args()
    if given.half == "pack":
        pack(given.wheels, given.python_version)
        return 0
    return run(given.wheels, given.results, given.backend)


if __name__ == "__main__":
    sys.exit(main())
