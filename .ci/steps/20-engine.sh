#!/usr/bin/env bash
# An engine that answers: the one that runs already, else one of our own, which .ci/ends/engine.sh ends.
set -euo pipefail
state=${CI_STATE:-$(mktemp -d)}

answers() { docker version --format '{{.Server.Version}}' >/dev/null 2>&1; }

start() {
    # In a session of its own: it outlives this step.
    setsid dockerd "$@" >"$state/dockerd.txt" 2>&1 &
    pid=$!
    for _ in $(seq 60); do
        if answers; then
            echo "$pid" >"$state/dockerd.pid"
            return 0
        fi
        kill -0 "$pid" 2>/dev/null || break
        sleep 0.5
    done
    kill "$pid" 2>/dev/null || true
    wait "$pid" 2>/dev/null || true
    return 1
}

if ! answers; then
    # What dockerd takes by itself (overlay2) does not work on every file system; vfs does, slowly.
    start || start --storage-driver vfs || {
        tail -n 30 "$state/dockerd.txt"
        exit 3
    }
fi
docker version --format 'engine {{.Server.Version}}'
docker info --format 'storage {{.Driver}}, {{.NCPU}} cores'
