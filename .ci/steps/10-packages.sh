#!/usr/bin/env bash
# The engine and debootstrap, where they are missing.
set -euo pipefail

missing=()
command -v dockerd >/dev/null || missing+=(docker.io)
command -v debootstrap >/dev/null || missing+=(debootstrap)
command -v git >/dev/null || missing+=(git)
# Debian's python3 has no ensurepip until its venv package is there.
python3 -c 'import ensurepip, sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null || missing+=(python3 python3-venv)
if [ ${#missing[@]} -gt 0 ]; then
    apt-get update -qq
    apt-get install -qq --yes "${missing[@]}"
fi
dockerd --version
debootstrap --version
