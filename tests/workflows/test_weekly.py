"""The weekly workflow, run by act.

What takes hours or needs a registry is a stand-in: what nox's sessions print and leave. The pull request goes to a real
HTTP server, its branch into a real repository, and the SBOM is syft's.
"""

from __future__ import annotations

import json
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from tests.workflows.acting import Project
from tests.workflows.github_server import REPOSITORY, TOKEN, serving

DIGEST = "sha256:" + "5" * 64
NOX = r"""#!/usr/bin/env bash
set -euo pipefail
case "$*" in
    "-s survey -- --package deepspeed --write") echo '{"more": 1}' > docs/survey-deepspeed.json; exit 1 ;;
    "-s survey -- --package transformers --write") echo '{"more": 2}' > docs/survey-transformers.json ;;
    "-s watch -- --stack newest --write")
        [ "$WATCH" != nothing ] || exit 0
        [ "$WATCH" != lost ] || { echo "the index does not answer" >&2; exit 1; }
        sed -i '0,/^  newest:/! {0,/accelerate: .*/ s//accelerate: 99.0.0/}' matrix.yaml
        echo "newest: newer releases: accelerate 99.0.0"
        [ "$WATCH" != wrong ] || { echo "regression: cpu/newest/x"; exit 1; } ;;
    "-s ci -- lock newest") sed -i 's/^accelerate==.*/accelerate==99.0.0/' docker/locks/newest.txt ;;
    "-s ci -- defects") ;;
    "-s ci -- propose "*) shift 3; exec PYTHON -m ci "$@" ;;
    "-s images -- newest --push "*) echo "newest: made"; echo "newest: pushed as $6@DIGEST" ;;
    "-s sbom -- "*@DIGEST" sbom.spdx.json")
        exec SYFT scan --quiet docker:debian:bookworm-slim --output "spdx-json=$5" ;;
    *) echo "not expected: $*" >&2; exit 1 ;;
esac
"""


@pytest.fixture
def project(tmp_path: Path) -> Project:
    found = Project.copied(tmp_path)
    python, syft = (shlex.quote(str(Path(sys.executable).with_name(name))) for name in ("python", "syft"))
    nox = tmp_path / "nox"
    nox.write_text(NOX.replace("DIGEST", DIGEST).replace("PYTHON", python).replace("SYFT", syft))
    nox.chmod(0o755)
    found.environment["NOX"] = str(nox)
    return found


def test_by_hand_only_one_of_the_three_runs_and_what_was_measured_is_kept(project: Project) -> None:
    outcome = project.act("workflow_dispatch", "weekly.yml", payload={"inputs": {"only": "survey"}})
    assert outcome.code != 0 and "not expected" not in outcome.said, outcome.said
    assert set(outcome.left) == {"survey-deepspeed", "survey-transformers"}
    # That of the failing package too.
    assert json.loads((outcome.left["survey-deepspeed"] / "survey-deepspeed.json").read_text()) == {"more": 1}


def test_newer_releases_become_one_pull_request_a_draft_where_a_case_is_wrong(project: Project, tmp_path: Path) -> None:
    bare = tmp_path / "server" / f"{REPOSITORY}.git"
    subprocess.run(["git", "init", "--quiet", "--bare", str(bare)], check=True, timeout=60)
    project.token = TOKEN
    with serving() as kept:
        project.environment |= {
            "GITHUB_API_URL": kept.url,
            "GITHUB_REPOSITORY": REPOSITORY,
            "GITHUB_SERVER_URL": f"file://{bare.parents[1]}",
        }
        for found in ("wrong", "right"):
            project.environment["WATCH"] = found
            outcome = project.act("schedule", "weekly.yml", "--job", "watch")
            assert outcome.passed, outcome.said
        (pull,) = kept.pulls
        assert (pull["head"], pull["base"], pull["draft"]) == ("watch/newest", "main", True)
        assert "accelerate 99.0.0" in pull["body"] and "regression" not in pull["body"], "the second run rewrote it"
        show = ["git", "-C", str(bare), "show", "--stat", "--format=%s", "watch/newest"]
        said = subprocess.run(show, check=True, stdout=subprocess.PIPE, text=True, timeout=60).stdout
        assert "newest: newer releases" in said and "matrix.yaml" in said and "docker/locks/newest.txt" in said
        assert "2 files changed" in said

        asked = len(kept.asked)
        project.environment["WATCH"] = "lost"
        lost = project.act("schedule", "weekly.yml", "--job", "watch")
        assert lost.code != 0 and "the index does not answer" in lost.said
        project.environment["WATCH"] = "nothing"
        assert project.act("schedule", "weekly.yml", "--job", "watch").passed
        assert len(kept.asked) == asked, "nothing to propose"


def test_an_image_is_pushed_with_its_provenance_and_what_is_in_it(project: Project, tmp_path: Path) -> None:
    login = tmp_path / "docker"
    login.write_text('#!/bin/sh\n[ "$1 $2" = "login registry.test" ] && grep -q t0ken\n')
    login.chmod(0o755)
    project.token = TOKEN
    project.environment |= {"DOCKER": str(login), "GITHUB_REPOSITORY": REPOSITORY}
    outcome = project.act("schedule", "weekly.yml", "--job", "images", "--var", "REGISTRY=registry.test")
    assert outcome.passed, outcome.said
    wanted = f"registry.test/{REPOSITORY}/stack@{DIGEST}"
    attested = {file.name: file.read_text().strip() for file in outcome.left["attested"].iterdir()}
    assert attested == {"provenance": wanted, "sbom.spdx.json": wanted}
    sbom = json.loads((outcome.left["sbom"] / "sbom.spdx.json").read_text())
    assert sbom["spdxVersion"].startswith("SPDX-2") and "bash" in {package["name"] for package in sbom["packages"]}
