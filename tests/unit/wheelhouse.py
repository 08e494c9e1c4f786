"""A folder of small made-up wheels and a lock over them: a stack that installs in a second, without a network."""

from __future__ import annotations

import base64
import hashlib
import io
import zipfile
from collections.abc import Mapping
from pathlib import Path

from ci.provision import locks
from ci.provision.runtime import Recipe

ROOT = Path(__file__).resolve().parents[2]
BESIDES = dict.fromkeys(locks.BESIDES, "1.0")


def make_wheel(folder: Path, name: str, version: str, requires: tuple[str, ...] = ()) -> Path:
    """A pure wheel with one module that knows its version."""
    module = name.replace("-", "_")
    info = f"{module}-{version}.dist-info"
    metadata = f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n"
    metadata += "".join(f"Requires-Dist: {requirement}\n" for requirement in requires)
    files = {
        f"{module}.py": f"__version__ = {version!r}\n",
        f"{info}/METADATA": metadata,
        f"{info}/WHEEL": "Wheel-Version: 1.0\nGenerator: tests\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
    }
    record = "".join(
        f"{path},sha256={base64.urlsafe_b64encode(hashlib.sha256(text.encode()).digest()).decode().rstrip('=')},{len(text)}\n"
        for path, text in files.items()
    )
    files[f"{info}/RECORD"] = record + f"{info}/RECORD,,\n"
    content = io.BytesIO()
    with zipfile.ZipFile(content, "w") as archive:
        for path, text in files.items():
            archive.writestr(zipfile.ZipInfo(path), text)
    folder.mkdir(parents=True, exist_ok=True)
    wheel = folder / f"{module}-{version}-py3-none-any.whl"
    wheel.write_bytes(content.getvalue())
    return wheel


def make_stack(root: Path, wheels: Path, pins: Mapping[str, str], stack: str = "small") -> Recipe:
    """Wheels, a lock with their hashes, and the recipe of a stack of them, with the real installer beside the lock."""
    docker = root / "docker"
    (docker / "locks").mkdir(parents=True, exist_ok=True)
    for name in ("install-stack.sh", "replace-packages.sh", "record-packages.py"):
        (docker / name).write_bytes((ROOT / "docker" / name).read_bytes())
    lines = []
    for name, version in sorted({**BESIDES, **pins}.items()):
        digest = hashlib.sha256(make_wheel(wheels, name, version).read_bytes()).hexdigest()
        lines.append(f"{name}=={version}" + ("" if name == "torch" else f" \\\n    --hash=sha256:{digest}"))
    lock = docker / "locks" / f"{stack}.txt"
    lock.write_text("\n".join(lines) + "\n")
    return Recipe(
        stack=stack,
        backend="cpu",
        python="3.11",
        lock=lock,
        pins=pins,
        dockerfile=docker / "cpu.Dockerfile",
        base_image="debian:bookworm-slim",
    )
