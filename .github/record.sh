#!/usr/bin/env bash
# What a night leaves: issues, and on the branch `status` the badges, the summary and what the next night compares with.
# Takes the folders of its runs. Started again it changes nothing.
set -euo pipefail
[ -e "$1" ] || { echo "no job left results: nothing to record"; exit 0; }
nox=.venv/bin/nox

# The token in a header of these commands, never in a URL or a file.
authorization="Authorization: Basic $(printf 'x-access-token:%s' "$GITHUB_TOKEN" | base64 --wrap 0)"
export GIT_CONFIG_COUNT=1 GIT_CONFIG_KEY_0="http.$GITHUB_SERVER_URL/.extraheader" GIT_CONFIG_VALUE_0=$authorization
git init --quiet --initial-branch status status
git -C status remote add origin "$GITHUB_SERVER_URL/$GITHUB_REPOSITORY.git"
if [ -n "$(git -C status ls-remote origin refs/heads/status)" ]; then
    git -C status fetch --quiet --depth 1 origin status
    git -C status reset --quiet --hard FETCH_HEAD
fi

"$nox" -s report -- "$@" --out report
"$nox" -s ci -- issues "$@" --history status/history.json --apply
cp report/badge-*.svg status/
cp report/summary.md status/README.md

git -C status add --all
git -C status diff --cached --quiet && { echo "the branch status is up to date"; exit 0; }
git -C status -c user.name="github-actions[bot]" -c user.email="41898282+github-actions[bot]@users.noreply.github.com" \
    commit --quiet --message "Night of $(date --utc +%F)"
git -C status push --quiet origin HEAD:status
