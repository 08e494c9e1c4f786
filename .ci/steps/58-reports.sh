#!/usr/bin/env bash
# The reports' own commands on their own releases: the defects as reported, and corrected by --external_plugins; and
# with a DeepSpeed beyond ms-swift's bound, and with the newest ms-swift.
set -euo pipefail
said=$(mktemp)
trap 'rm -f "$said"' EXIT
.venv/bin/nox -s cpu-zero -- --stack swift-3.10.2 --runtime venv --corrections both | tee "$said"
grep -q '3 known defect, 4 corrected, 5 ok' "$said"
.venv/bin/nox -s cpu-zero -- --stack swift-3.10.2-fixed --runtime venv | tee "$said"
grep -q '2 known defect, 6 ok' "$said"
.venv/bin/nox -s cpu-zero -- --stack swift-newest --runtime venv | tee "$said"
grep -q '2 known defect, 6 ok' "$said"
