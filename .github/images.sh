#!/usr/bin/env bash
# Build the image of a stack, push it with its base to REGISTRY/REPOSITORY, and write what is in it (sbom.spdx.json).
# Prints name= and digest= for a job's output.
set -euo pipefail
stack=$1
reference=$2
nox=${NOX:-.venv/bin/nox}

"$nox" -s images -- "$stack" --push "$reference" | tee images.txt >&2
pushed=$(sed -n "s/^$stack: pushed as //p" images.txt)
case $pushed in
    "$reference"@sha256:*) ;;
    *) echo "$stack: found no digest of the registry in what \`images --push\` said" >&2; exit 1 ;;
esac
"$nox" -s sbom -- "$pushed" sbom.spdx.json >&2
echo "name=$reference"
echo "digest=${pushed#*@}"
