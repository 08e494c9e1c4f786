#!/usr/bin/env bash
# The base of the CPU image without a registry, unless this host has it.
set -euo pipefail
.venv/bin/nox -s base-image -- --if-absent
