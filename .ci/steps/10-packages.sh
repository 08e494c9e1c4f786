#!/usr/bin/env bash
# The engine, debootstrap and what the tests of the page need, where they are missing.
set -euo pipefail

missing=()
command -v dockerd >/dev/null || missing+=(docker.io)
command -v debootstrap >/dev/null || missing+=(debootstrap)
command -v docker-registry >/dev/null || missing+=(docker-registry)
command -v git >/dev/null || missing+=(git)
# Debian's python3 has no ensurepip until its venv package is there.
python3 -c 'import ensurepip, sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null || missing+=(python3 python3-venv)
# What these two recommend is a desktop.
page=()
command -v chromium >/dev/null || page+=(chromium fonts-dejavu-core)
command -v npm >/dev/null || page+=(npm)
if [ $((${#missing[@]} + ${#page[@]})) -gt 0 ]; then
    apt-get update -qq
    [ ${#missing[@]} -eq 0 ] || apt-get install -qq --yes "${missing[@]}"
    [ ${#page[@]} -eq 0 ] || apt-get install -qq --yes --no-install-recommends "${page[@]}"
fi
dockerd --version
debootstrap --version
chromium --version
npm --version
