#!/usr/bin/env bash
# The release that mended report A, between two of them: an overlay of each is made, run, and told apart.
set -euo pipefail
said=$(mktemp)
trap 'rm -f "$said"' EXIT
.venv/bin/nox -s bisect -- --job grpo-lora --case zero_stage=0,dtype=bf16 --good 0.18.6 --bad 0.18.5 | tee "$said"
grep -q '^0\.18\.6: is right again' "$said"
