"""Where behaviour changes in a row of releases (or commits), with as few probes as that takes.

Pure: a probe is any function from a position to an outcome. Positions that are no behaviour (cannot be installed, a
crash) are stepped over, so that a boundary beside them is a range and never a guess.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from ci.probe import Outcome, alike

Look = Callable[[int], Outcome]


@dataclass(frozen=True)
class Boundary:
    """Behaviour differs between two positions; those between them say nothing (empty where they are neighbours)."""

    before: int
    after: int
    between: tuple[int, ...] = ()


@dataclass(frozen=True)
class Gap:
    """Two positions of equal behaviour with unprobed ones between: a change there and back would not be seen."""

    first: int
    last: int


class Search:
    """Remembers what was looked at."""

    def __init__(self, look: Look) -> None:
        self._look = look
        self.seen: dict[int, Outcome] = {}

    def at(self, position: int) -> Outcome:
        """The outcome at a position, looked at once."""
        if position not in self.seen:
            self.seen[position] = self._look(position)
        return self.seen[position]

    def sampled(self, samples: Sequence[int], start: int = 0) -> list[int]:
        """The samples that are behaviours; where one is not, the nearest earlier position after the sample before."""
        found: list[int] = []
        earliest = start
        for sample in samples:
            usable = next((at for at in range(sample, earliest - 1, -1) if self.at(at).counts), None)
            if usable is not None:
                found.append(usable)
            earliest = sample + 1
        return found

    def boundaries(self, samples: Sequence[int]) -> list[Boundary]:
        """All boundaries between neighbouring samples that differ, in order. Samples are behaviours."""
        return [boundary for low, high in itertools.pairwise(samples) for boundary in self._between(low, high)]

    def _between(self, low: int, high: int) -> Iterator[Boundary]:
        if alike(self.at(low), self.at(high)):
            return
        middle = (low + high) // 2
        # From the middle outwards: the first position that is a behaviour halves the interval best.
        for position in sorted(range(low + 1, high), key=lambda at: (abs(at - middle), at)):
            if self.at(position).counts:
                yield from self._between(low, position)
                yield from self._between(position, high)
                return
        yield Boundary(low, high, tuple(range(low + 1, high)))

    def gaps(self, samples: Sequence[int]) -> list[Gap]:
        """Where neighbours of all that was looked at are alike, with positions between them that nobody looked at."""
        known = sorted(at for at in self.seen if self.seen[at].counts and samples[0] <= at <= samples[-1])
        return [
            Gap(low, high)
            for low, high in itertools.pairwise(known)
            if alike(self.seen[low], self.seen[high]) and any(at not in self.seen for at in range(low + 1, high))
        ]
