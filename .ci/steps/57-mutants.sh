#!/usr/bin/env bash
# Every planted fault in the first of its cases: the checks notice it. All cases: nox -s mutants.
set -euo pipefail
.venv/bin/nox -s mutants -- --first
