"""What generated tests share: how many examples, and values that nobody expects.

`FUZZ_EXAMPLES=10000 pytest tests/unit/test_matrix_fuzz.py` looks longer than CI does.
"""

from __future__ import annotations

import copy
import os
from collections.abc import Iterator
from typing import Any

from hypothesis import strategies as st

EXAMPLES = int(os.environ.get("FUZZ_EXAMPLES", "500"))

ODD: tuple[Any, ...] = (
    *(None, True, False, 0, 1, -1, 4, 10**30, 0.5, -0.0, 1e308, float("inf"), float("nan")),
    *(
        "",
        " ",
        "x",
        "not-",
        "not-bf16",
        "0",
        "1.0",
        ">=1",
        ">=0.14,<0.19",
        "nan",
        "inf",
        "a/b",
        "../x",
        "\u00fc",
        "\x00",
    ),
    *(
        [],
        [[]],
        [None],
        [1, "x"],
        ["bf16", "bf16"],
        {},
        {"": ""},
        {"x": 1},
        {"where": {}, "reason": ""},
        {"equals": "none"},
    ),
)
"""Values of every kind, none of which stands where it belongs."""

odd = st.one_of(st.sampled_from(ODD), st.text(max_size=5), st.integers(), st.floats())

Place = tuple[str | int, ...]


def places(data: Any, here: Place = ()) -> Iterator[Place]:
    """The path of every value below the root."""
    items = data.items() if isinstance(data, dict) else enumerate(data) if isinstance(data, list) else ()
    for key, value in items:
        yield (*here, key)
        yield from places(value, (*here, key))


@st.composite
def changed(draw: st.DrawFn, original: Any, keys: tuple[str, ...]) -> Any:
    """The data with up to three values replaced, removed, renamed, doubled or swapped."""
    data = copy.deepcopy(original)
    for _ in range(draw(st.integers(1, 3))):
        place: list[Any] = list(draw(st.sampled_from(list(places(data)) or [("x",)])))
        *parents, last = place
        parent = data
        for key in parents:
            parent = parent[key]
        if not parents and last not in data:
            break
        how = draw(st.sampled_from(("replace", "replace", "remove", "rename", "swap", "again")))
        if how == "replace":
            parent[last] = copy.deepcopy(draw(odd))  # a later change must not reach the list above
        elif how == "remove":
            del parent[last]
        elif how == "rename" and isinstance(parent, dict):
            parent[draw(st.sampled_from(keys))] = parent.pop(last)
        elif how == "swap":
            other = draw(st.sampled_from(list(parent) if isinstance(parent, dict) else range(len(parent))))
            parent[last], parent[other] = parent[other], parent[last]
        elif isinstance(parent, list):
            parent.append(copy.deepcopy(parent[last]))
    return data
