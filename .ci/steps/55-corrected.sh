#!/usr/bin/env bash
# A known defect as it is and corrected, in the image: corrections reach a container too.
set -euo pipefail
said=$(mktemp)
trap 'rm -f "$said"' EXIT
.venv/bin/nox -s cpu-zero -- --case zero_stage=0,dtype=fp32 --corrections both | tee "$said"
grep -q '1 known defect, 1 corrected' "$said"
