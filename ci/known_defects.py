"""docs/known-defects.md, generated from the ledger: one page that a person can search before reading any YAML."""

from __future__ import annotations

import json

from ci.entries import MODE, Defect, Effect, Symptom
from ci.matrix import Matrix

HEADER = """# Known defects

Generated from the `defects:` section of matrix.yaml by `python -m ci defects`; edit that, not this page.
A symptom is exact: a cell counts as a known defect only where its numbers equal what the entries that claim it predict
together, within the tolerance of the check. Numbers were measured on CPU with the stacks of matrix.yaml; none of them
has been run on an A800 or a 910B by this project yet.
"""

NAMES = {
    "last_micro_batch": "that of the last micro-batch alone",
    "first_and_last_micro_batch": "that of the first and the last micro-batch alone",
    "previous_step": "with the previous step's gradient where a parameter got none in this step",
    "all_steps_so_far": "that of the sum of the gradients of all steps so far",
    "all_steps_so_far_unclipped": "that of the sum of the gradients of all steps so far, unclipped",
    "step_count_plus_one": "as if the optimizer had stepped once more before",
    "without_experts": "that of the parameters outside the experts",
    "masters_not_restored": "as if the engine had loaded the weights of the checkpoint, and had masters of its own",
    "own_rank_only": "that of each partition's own rank alone, not averaged over the ranks",
    "partitioned_as_empty": "as if the partitioned parameter were empty",
    "bias_added_after_rounding": "as if linear layers added their bias to a product that was rounded before",
    "unclipped": "unclipped",
    "none": "None",
    "inf": "inf",
}


def page(matrix: Matrix) -> str:
    """The whole page, entries by id."""
    table = ["| defect | releases | where |", "|---|---|---|"]
    table += [f"| [{defect.id}](#{defect.id}) | {releases(defect)} | {where(defect)} |" for defect in matrix.defects]
    return "\n".join([HEADER, *table, "", *(_section(defect) for defect in matrix.defects)])


def link(reference: str) -> str:
    """A Markdown link of "owner/name#123"; GitHub sends issues and pull requests to each other."""
    repository, _, number = reference.partition("#")
    return f"[{reference}](https://github.com/{repository}/issues/{number})"


def _section(defect: Defect) -> str:
    lines = [
        f"## {defect.id}",
        "",
        f"{defect.title}.",
        "",
        f"- **releases**: {releases(defect)}",
        f"- **where**: {where(defect)}",
        f"- **symptom**: {symptom(defect.symptom)}",
        f"- **advice**: {defect.advice}",
        f"- **upstream**: {', '.join(map(link, defect.upstream))}",
    ]
    if defect.config is not None:
        lines.append(f"- **configuration**: `{json.dumps(defect.config)}`")
    if defect.corrections:
        lines.append(f"- **correction**: {' and '.join(f'`{file}`' for file in corrections(defect))}")
    return "\n".join(lines) + "\n"


def corrections(defect: Defect) -> list[str]:
    """The files that make it right together, each with the mode where only one does."""
    parts = [name.partition(MODE) for name in defect.corrections]
    return [f"ci/corrections/{stem}.py" + (f" ({stem.upper()}={mode})" if mode else "") for stem, _, mode in parts]


def releases(defect: Defect) -> str:
    """The releases affected, in words."""
    return ", ".join(f"{package} {specifier}" for package, specifier in defect.affects.items())


def where(defect: Defect) -> str:
    """The configurations in which the defect shows, in words."""

    def text(value: object) -> str:
        return " or ".join(map(str, value)) if isinstance(value, (tuple, list)) else str(value)

    return ", ".join(f"{key} {text(value)}" for key, value in defect.where.items())


def symptom(of: Symptom) -> str:
    """What it looks like, in words."""
    if of.raises is not None:
        return f"raises `{of.raises}`"
    when = {"all": "", "first": " in the first step", "scale_raise": " in steps at which the loss scale rises"}
    suffix = when.get(of.steps, f" from step {of.steps.removeprefix('from:')} on")
    return "; ".join(f"`{check}` is {_effect(effect)}" for check, effect in of.effects.items()) + suffix


def _effect(effect: Effect) -> str:
    base = NAMES[effect.equals] if effect.equals is not None else "the true one"
    return base if effect.times is None else f"{base}, times {effect.times}"
