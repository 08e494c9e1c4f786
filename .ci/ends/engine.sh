#!/usr/bin/env bash
# End the engine, if it was .ci/steps/20-engine.sh that started it.
set -euo pipefail
pid_file=${CI_STATE:?}/dockerd.pid
[ -f "$pid_file" ] || exit 0
pid=$(cat "$pid_file")
kill "$pid" 2>/dev/null || exit 0
for _ in $(seq 40); do
    kill -0 "$pid" 2>/dev/null || exit 0
    sleep 0.5
done
kill -9 "$pid"
