#!/usr/bin/env bash
# Newer releases than the pins of a stack: run them, and propose the moved pins in one pull request, a draft where a
# case does not train correctly with them. Takes the stack.
set -euo pipefail
stack=$1
nox=${NOX:-.venv/bin/nox}
branch=watch/$stack

code=0
"$nox" -s watch -- --stack "$stack" --write 2>&1 | tee watch.txt || code=$?
git diff --quiet -- matrix.yaml && { echo "$stack: no pin moves"; exit "$code"; }
# Whatever follows from moved pins belongs to the same change.
"$nox" -s ci -- lock "$stack"
"$nox" -s ci -- defects

# The token in a header of these commands, never in a URL or a file.
authorization="Authorization: Basic $(printf 'x-access-token:%s' "$GITHUB_TOKEN" | base64 --wrap 0)"
export GIT_CONFIG_COUNT=1 GIT_CONFIG_KEY_0="http.$GITHUB_SERVER_URL/.extraheader" GIT_CONFIG_VALUE_0=$authorization
git checkout --quiet -B "$branch"
git add matrix.yaml docker/locks docs/known-defects.md
git -c user.name="github-actions[bot]" -c user.email="41898282+github-actions[bot]@users.noreply.github.com" \
    commit --quiet --message "$stack: newer releases"
git push --quiet --force "$GITHUB_SERVER_URL/$GITHUB_REPOSITORY.git" "HEAD:refs/heads/$branch"
draft=()
[ "$code" -eq 0 ] || draft=(--draft)
"$nox" -s ci -- propose --branch "$branch" --title "$stack: newer releases" --said watch.txt "${draft[@]}"
