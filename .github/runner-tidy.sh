#!/usr/bin/env bash
# Before and after each job of a runner that is kept: what this project left on the engine and no longer needs.
# Images older than KEEP_HOURS (a stack that is still wanted is made anew, from the build cache), containers that have
# ended, and volumes of byte code without a container. A container that runs is a run's, and stays.
set -euo pipefail
keep=${KEEP_HOURS:-336}
project=zero-regression-matrix

docker container prune --force --filter "label=$project.owner"
docker image prune --all --force --filter "label=$project.stack" --filter "until=${keep}h"
docker volume ls --quiet --filter "label=$project=bytecode" --filter dangling=true |
    xargs --no-run-if-empty docker volume rm
docker builder prune --force --filter "until=${keep}h"
