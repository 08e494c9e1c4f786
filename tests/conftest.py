"""Signals as a terminal gives them, wherever the tests are started.

A shell's background job ignores SIGINT, nohup SIGHUP, and children inherit that: interrupts would be waited for in vain.
"""

from __future__ import annotations

import signal

import pytest


def pytest_configure(config: pytest.Config) -> None:
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.signal(signal.SIGHUP, signal.SIG_DFL)
