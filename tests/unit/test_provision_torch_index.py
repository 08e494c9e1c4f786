"""torch from an index of its own: asked only where local wheels lack it, and for nothing but torch."""

from __future__ import annotations

import dataclasses
import sys
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from ci.errors import EnvironmentUnavailable
from ci.provision import locks
from ci.provision.runtime import Recipe
from ci.provision.site import Site
from ci.provision.venv import VenvRuntime
from tests.unit.wheelhouse import make_stack

PINS = {"torch": "2.0+cpu", "peft": "2.0"}


@dataclass
class Server:
    """Two indexes on this host: /torch has torch only, as PyTorch's has; /default has nothing."""

    address: str
    asked: list[str] = field(default_factory=list)


@pytest.fixture
def server(tmp_path: Path) -> Iterator[Server]:
    folder = tmp_path / "served"
    folder.mkdir()
    served = Server("")

    class Handler(SimpleHTTPRequestHandler):
        def log_request(self, code: object = "-", size: object = "-") -> None:
            served.asked.append(self.path)

        def log_message(self, format: str, *args: object) -> None:
            """Not to the terminal."""

    with ThreadingHTTPServer(("127.0.0.1", 0), partial(Handler, directory=str(folder))) as http:
        served.address = f"http://127.0.0.1:{http.server_port}"
        thread = threading.Thread(target=http.serve_forever)
        thread.start()
        try:
            yield served
        finally:
            http.shutdown()
            thread.join()


@pytest.fixture
def recipe(tmp_path: Path, server: Server) -> Recipe:
    """A stack whose torch only the served index has."""
    wheels = tmp_path / "wheels"
    recipe = make_stack(tmp_path, wheels, PINS)
    page = tmp_path / "served" / "torch" / "torch"
    page.mkdir(parents=True)
    wheel = next(wheels.glob("torch-*"))
    wheel.rename(page / wheel.name)
    link = wheel.name.replace("+", "%2B")
    (page / "index.html").write_text(f'<!DOCTYPE html><html><body><a href="{link}">{wheel.name}</a></body></html>')
    python = ".".join(map(str, sys.version_info[:2]))
    return dataclasses.replace(recipe, python=python, torch_index=f"{server.address}/torch")


@pytest.fixture
def site(tmp_path: Path, server: Server) -> Site:
    """Everything but torch in a folder, and a default index that knows nothing."""
    indexes = {"UV_DEFAULT_INDEX": f"{server.address}/default", "UV_CACHE_DIR": str(tmp_path / "uv-cache")}
    return Site(wheel_folders=(tmp_path / "wheels",), indexes=indexes)


def test_torch_comes_from_its_index_and_nothing_else_does(
    recipe: Recipe, site: Site, server: Server, tmp_path: Path
) -> None:
    made = VenvRuntime(tmp_path, site).provision(recipe)
    assert made.packages["torch"] == "2.0+cpu" and made.packages["peft"] == "2.0"
    assert {path.split("/")[2] for path in server.asked if path.startswith("/torch/")} == {"torch"}


def test_a_local_wheel_comes_before_the_index(recipe: Recipe, site: Site, server: Server, tmp_path: Path) -> None:
    wheel = next((tmp_path / "served").rglob("*.whl"))
    (tmp_path / "wheels" / wheel.name).write_bytes(wheel.read_bytes())
    VenvRuntime(tmp_path, site).provision(recipe)
    assert not [path for path in server.asked if path.startswith("/torch/")]


def test_an_emptied_index_is_not_asked(recipe: Recipe, site: Site, server: Server, tmp_path: Path) -> None:
    with pytest.raises(EnvironmentUnavailable, match="torch"):
        VenvRuntime(tmp_path, site).provision(dataclasses.replace(recipe, torch_index=""))
    assert not [path for path in server.asked if path.startswith("/torch/")]


def test_a_lock_takes_torch_from_its_index_without_naming_it(recipe: Recipe, site: Site, server: Server) -> None:
    text = locks.compile_lock(recipe, site)
    assert locks.mistakes(text, recipe.pins) == []
    assert "127.0.0.1" not in text
    assert {path.split("/")[2] for path in server.asked if path.startswith("/torch/")} == {"torch"}
