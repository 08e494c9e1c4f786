#!/usr/bin/env bash
# The README's second command, as it stands there: everything that proves this project.
set -euo pipefail
command=$(grep -m 1 -E '^python3 -m venv .*nox -s tests$' README.md)
bash -euc "$command"
