#!/usr/bin/env bash
# Style and types, before anything that takes minutes.
set -euo pipefail
python3 -m venv .venv
.venv/bin/pip install --quiet "nox[uv]"
.venv/bin/nox -s lint types
