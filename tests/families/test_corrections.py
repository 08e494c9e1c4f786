"""Corrections on the releases that need them: right in norm, gradient and update; and elsewhere nothing moves, bitwise.

`families` ran every claimed cell of the lane a second time, corrected; here those cells are looked at, and the cells
that nothing claims run once more with every correction on.
"""

from __future__ import annotations

import json
import time
from pathlib import Path

import pytest

from ci import evidence, order
from ci.entries import MODE
from ci.matrix import Matrix
from ci.provision.recipe import recipe_for
from ci.provision.venv import VenvRuntime
from ci.runrecord import EVIDENCE, CellRecord, RunRecord, Verdict
from tests.families.conftest import ROOT, Families

FILES = sorted(path.stem for path in (ROOT / "ci" / "corrections").glob("*.py"))
MAKES_RIGHT = ("reported_norm", "gradient_used", "update")
LIMIT_S = 900
"""For the cells of one stack that nothing claims; they took 40 s on two busy cores."""


def corrected(record: RunRecord, matrix: Matrix) -> list[CellRecord]:
    """The corrected cells that ran to their end: those that a correction stops on purpose are judged by its message."""
    stops = {
        f"{stem}{MODE}{name}"
        for stem, correction in matrix.corrections.items()
        for name, mode in correction.modes.items()
        if mode.raises is not None
    }
    return [cell for cell in record.cells if cell.corrections and not stops & set(cell.corrections)]


def test_every_claimed_cell_that_has_a_correction_is_right_with_it(record: RunRecord) -> None:
    found = {cell.id: (cell.verdict, cell.reason) for cell in record.cells if cell.corrections}
    assert found
    assert {id_: why for id_, why in found.items() if why[0] is not Verdict.CORRECTED} == {}


def test_a_corrected_cell_is_right_in_norm_gradient_and_update_together(record: RunRecord, matrix: Matrix) -> None:
    """But for what an entry without a correction says of it; a correction of the number alone is none."""
    whole = [cell for cell in corrected(record, matrix) if not cell.defects]
    assert whole
    for cell in whole:
        assert cell.exception is None and cell.steps, cell.id
        for step in cell.steps:
            wrong = [found for found in step.checks if found.ok is False]
            assert not wrong, (cell.id, step.index, wrong)
            judged = {found.name for found in step.checks if found.ok}
            assert judged.issuperset(MAKES_RIGHT) or step.overflow, (cell.id, step.index, judged)


def test_what_is_not_corrected_has_no_correction(record: RunRecord, matrix: Matrix) -> None:
    without = {defect.id for defect in matrix.defects if not defect.corrections}
    for cell in corrected(record, matrix):
        assert set(cell.defects) <= without, (cell.id, cell.defects)


@pytest.mark.parametrize("name", FILES)
def test_each_correction_is_needed(name: str, record: RunRecord) -> None:
    """A cell is wrong without it and right with it: were the file to do nothing, the run above would be red."""
    by_id = {cell.id: cell for cell in record.cells}
    shown = [
        cell.id
        for cell in record.cells
        if cell.verdict is Verdict.CORRECTED
        and any(applied.partition(MODE)[0] == name for applied in cell.corrections)
        and by_id[cell.id.partition("+")[0]].verdict is Verdict.KNOWN_DEFECT
    ]
    assert shown


def test_every_mode_of_a_correction_is_shown(record: RunRecord, matrix: Matrix) -> None:
    modes = {f"{stem}{MODE}{mode}" for stem, correction in matrix.corrections.items() for mode in correction.modes}
    applied = {name for cell in record.cells if cell.verdict is Verdict.CORRECTED for name in cell.corrections}
    assert modes <= applied


def test_cells_that_nothing_claims_are_bitwise_the_same_with_every_correction_on(
    families: Families, record: RunRecord, matrix: Matrix, tmp_path: Path
) -> None:
    clean = {cell.id for cell in record.cells if cell.verdict is Verdict.OK}
    different: list[str] = []
    seen = 0
    for stack in {cell.stack: None for cell in record.cells if cell.id in clean}:
        whole = json.loads((families.folder / f"order.{stack}.json").read_text(encoding="utf-8"))
        whole["cells"] = [cell for cell in whole["cells"] if cell["id"] in clean]
        again = _run(matrix, stack, whole, tmp_path / stack)
        for cell in whole["cells"]:
            seen += 1
            before, after = families.reading.by_cell[cell["id"]], again.get(cell["id"])
            if after is None or after.problem or (before.steps, before.exception) != (after.steps, after.exception):
                different.append(f"{cell['id']}: {after.problem if after else 'no evidence'}")
    assert seen >= 30
    assert different == []


def _run(matrix: Matrix, stack: str, whole: dict[str, object], folder: Path) -> dict[str, evidence.Evidence]:
    folder.mkdir()
    order.write(folder / "order.json", whole)
    runtime = VenvRuntime(ROOT)
    environment = runtime.provision(recipe_for(matrix, stack, ROOT))
    running = runtime.start(environment, folder / "order.json", folder, 1, {"CI_CORRECTIONS": "all"})
    began = time.monotonic()
    try:
        while running.poll() is None and time.monotonic() - began < LIMIT_S:
            time.sleep(0.2)
    finally:
        running.terminate()
    return dict(evidence.read(folder / EVIDENCE).by_cell)
