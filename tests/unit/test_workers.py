"""How many cases run side by side."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ci import workers


@pytest.mark.parametrize(
    ("world_sizes", "cores", "free_mb", "count"),
    [
        ([2, 2, 2], 2, 24000, 1),
        ([2] * 10, 8, 24000, 4),
        ([2] * 3, 8, 24000, 3),  # no more workers than cases
        ([2] * 10, 8, 2500, 2),  # 2 x 2 x 600 MB fit, 3 x 2 x 600 MB do not
        ([2] * 10, 8, 100, 1),  # one always runs: world size is never gated
        ([2] * 10, 8, None, 4),
        ([4], 2, 24000, 1),
        ([2] * 9 + [4], 8, 24000, 4),  # one large case does not slow the many
        ([2] * 9 + [4], 8, 5000, 2),  # but all that run together must fit
        ([], 8, 24000, 1),
    ],
)
def test_choose(world_sizes: list[int], cores: int, free_mb: int | None, count: int) -> None:
    assert workers.choose(world_sizes, cores=cores, free_mb=free_mb).count == count


@given(
    st.lists(st.integers(1, 16), min_size=1, max_size=50),
    st.integers(1, 256),
    st.integers(0, 1_000_000) | st.none(),
)
def test_there_is_always_one_and_memory_is_never_overcommitted_by_more(
    world_sizes: list[int], cores: int, free_mb: int | None
) -> None:
    count = workers.choose(world_sizes, cores=cores, free_mb=free_mb).count
    assert 1 <= count <= len(world_sizes)
    if free_mb is not None and count > 1:
        assert count * max(world_sizes) * workers.MEMORY_PER_RANK_MB <= free_mb


def test_the_reason_names_what_limits() -> None:
    assert workers.choose([2] * 10, cores=8, free_mb=24000).why == "8 cores, 2 ranks a case"
    assert workers.choose([2] * 10, cores=8, free_mb=2500).why == "2500 MB free, 2 ranks of 600 MB a case"


def test_free_memory_is_read_and_cut_by_the_cgroup(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    meminfo = tmp_path / "meminfo"
    meminfo.write_text("MemTotal: 16000000 kB\nMemAvailable: 8388608 kB\n")
    limit, usage = tmp_path / "memory.max", tmp_path / "memory.current"
    monkeypatch.setattr(workers, "_CGROUP_LIMITS", ((limit, usage),))
    assert workers.free_memory_mb(meminfo) == 8192
    limit.write_text("max\n")
    usage.write_text("1000\n")
    assert workers.free_memory_mb(meminfo) == 8192
    limit.write_text(f"{3 * 1024**3}\n")
    usage.write_text(f"{1024**3}\n")
    assert workers.free_memory_mb(meminfo) == 2048
    assert workers.free_memory_mb(tmp_path / "none") == 2048
