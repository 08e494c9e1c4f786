"""What all tests share: which of them are slow, and signals as a terminal gives them, wherever they are started.

A background job of a shell ignores SIGINT, nohup SIGHUP; children inherit it, and would wait for interrupts in vain.
"""

from __future__ import annotations

import signal

import pytest


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--slow", action="store_true", help="run the tests that are marked slow, and only them")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    wanted = bool(config.getoption("--slow"))
    others = [item for item in items if (item.get_closest_marker("slow") is not None) != wanted]
    if others:
        config.hook.pytest_deselected(items=others)
        items[:] = [item for item in items if item not in others]


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "slow: takes more than about 15 seconds; runs with --slow only")
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.signal(signal.SIGHUP, signal.SIG_DFL)
