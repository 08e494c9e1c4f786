#!/bin/sh
# Install one lock into a fresh virtual environment; the same script makes an image's stack and one on the host.
#
#   install-stack.sh PYTHON LOCK TARGET
#
# Three steps: torch, from local wheels or else from TORCH_INDEX (an index of its own; empty: the default index); then
# everything that has a hash; then DeepSpeed, whose setup.py imports torch, built against what is installed already.
set -eu

python=$1 lock=$2 target=$3
here=$(cd "$(dirname "$0")" && pwd)
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT

grep '^torch==' "$lock" | cut -d ' ' -f 1 >"$work/torch.txt" || true
awk '/^[A-Za-z0-9]/ { keep = !/^(torch|deepspeed)==/ } keep' "$lock" >"$work/hashed.txt"
awk '/^[A-Za-z0-9]/ { keep = /^deepspeed==/ } keep' "$lock" >"$work/last.txt"

install() {
    uv pip install --quiet --python "$target/bin/python" --no-deps "$@"
}

# Relocatable: the folder is moved to its final place once it is whole.
uv venv --quiet --relocatable --no-python-downloads --python "$python" "$target"
if [ -s "$work/torch.txt" ]; then
    # Local wheels come first; only what they lack is asked of an index.
    install --no-index --requirements "$work/torch.txt" 2>"$work/log" ||
        install ${TORCH_INDEX:+--default-index "$TORCH_INDEX"} --requirements "$work/torch.txt"
fi
install --require-hashes --requirements "$work/hashed.txt"
if [ -s "$work/last.txt" ]; then
    install --require-hashes --no-build-isolation --requirements "$work/last.txt"
fi
"$target/bin/python" -I "$here/record-packages.py" >"$target/packages.json"
