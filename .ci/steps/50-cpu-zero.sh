#!/usr/bin/env bash
# The README's first command, as it stands there; with an engine that answers it must have run in Docker.
set -euo pipefail
command=$(grep -m 1 -E '^python3 -m venv .*nox -s cpu-zero$' README.md)
bash -euc "$command"
grep -q '"runtime": *"docker"' results/latest/run.json
