"""docs/known-defects.md says what the ledger says."""

from __future__ import annotations

from pathlib import Path

from ci.known_defects import link, page
from ci.matrix import load


def test_the_committed_page_is_up_to_date() -> None:
    assert Path("docs/known-defects.md").read_text(encoding="utf-8") == page(load()), "run `python -m ci defects`"


def test_every_entry_is_on_the_page_with_its_advice_and_links() -> None:
    matrix = load()
    text = page(matrix)
    for defect in matrix.defects:
        assert f"## {defect.id}\n" in text
        assert defect.advice in text
        assert all(link(reference) in text for reference in defect.upstream)


def test_a_link_goes_to_the_thread() -> None:
    assert link("owner/name#12") == "[owner/name#12](https://github.com/owner/name/issues/12)"
