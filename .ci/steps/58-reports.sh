#!/usr/bin/env bash
# Report A's own command on its own releases: the defects as reported, and corrected by --external_plugins.
set -euo pipefail
said=$(mktemp)
trap 'rm -f "$said"' EXIT
.venv/bin/nox -s cpu-zero -- --lane reports --runtime venv --corrections both | tee "$said"
grep -q '2 known defect, 2 corrected, 1 ok' "$said"
