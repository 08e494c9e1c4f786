"""Signals as a terminal gives them, wherever the tests are started.

A background job of a shell ignores SIGINT, nohup SIGHUP; children inherit it, and would wait for interrupts in vain.
"""

from __future__ import annotations

import signal

import pytest


def pytest_configure(config: pytest.Config) -> None:
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.signal(signal.SIGHUP, signal.SIG_DFL)
