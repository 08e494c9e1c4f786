#!/bin/sh
# Replace packages of an installed stack for one run (`--with`); without DIR/requirements.txt it does nothing.
#
#   replace-packages.sh TARGET DIR
#
# DIR/requirements.txt names what to install (a release, a wheel in DIR, a source tree in DIR), DIR/constraints.txt the
# pins of the stack that stay. What no longer fits together is written to TARGET/conflicts.txt for the report.
set -eu

target=$1 dir=$2
here=$(cd "$(dirname "$0")" && pwd)
[ -f "$dir/requirements.txt" ] || exit 0

cd "$dir"
uv pip install --quiet --python "$target/bin/python" --no-build-isolation-package deepspeed \
    --constraints constraints.txt --requirements requirements.txt
uv pip check --python "$target/bin/python" 2>&1 | grep '^The package' >"$target/conflicts.txt" || true
"$target/bin/python" -I "$here/record-packages.py" >"$target/packages.json"
