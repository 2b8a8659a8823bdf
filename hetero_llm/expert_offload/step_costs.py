"""Seconds of steps by number of tokens, where some experts run on the host; which experts of a long
step the threads compute while the link brings the others; and how much of the experts of a small
step the GPU reads over the link itself.

Graphs are timed by replays whose tokens are padding, and padding asks for no experts. The draft
budget (`spec_decode.budget`) would take more tokens for nearly free, while each wakes experts in
host memory.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations
from typing import TypeVar

import numpy as np
from numpy.typing import NDArray

Part = TypeVar("Part")
"""What the GPU computes of the experts on the host, a `bridge.expert_mailbox.LinkPart`."""


def with_host_experts(
    profile: Sequence[tuple[int, float]],
    layer_seconds: Mapping[int, float],
    *,
    num_layers: int,
    streamed_seconds: float,
) -> list[tuple[int, float]]:
    """A profile of steps with the time that they wait for experts on the host.

    Args:
        profile: (tokens, seconds) of replays that asked for none, ascending.
        layer_seconds: tokens -> seconds of one layer's exchange with the threads, measured with
            random experts, at least one size. Between sizes it is interpolated; below the smallest
            it is proportional, down to half of it.
        num_layers: that have experts.
        streamed_seconds: of bringing a layer's experts to the GPU, as steps beyond the largest size
            do.

    Returns:
        (tokens, seconds) of the same sizes. Where experts are used again and again, steps are
        faster: observed steps correct the profile (`core.step_times`), by one factor for all sizes.
    """
    sizes = np.array(sorted(layer_seconds))
    seconds = np.array([layer_seconds[size] for size in sizes.tolist()])
    found = []
    for tokens, alone in profile:
        if tokens > sizes[-1]:
            layer = streamed_seconds
        elif tokens < sizes[0]:
            layer = float(seconds[0]) * max(tokens / float(sizes[0]), 0.5)
        else:
            layer = float(np.interp(tokens, sizes, seconds))
        found.append((tokens, alone + num_layers * layer))
    return found


@dataclass(frozen=True, slots=True)
class LaneCosts:
    """Seconds of a layer's experts on the host, in either lane.

    Attributes:
        exchange: of asking the threads at all.
        expert: of reading one expert, by the threads.
        row: of each token of an expert, by the threads.
        link: of bringing one expert to the GPU.
    """

    exchange: float
    expert: float
    row: float
    link: float

    def threads(self, rows: NDArray[np.integer]) -> float:
        """Of the threads, for experts by the number of tokens of each."""
        if not len(rows):
            return 0.0
        return self.exchange + len(rows) * self.expert + int(rows.sum()) * self.row

    def split(self, rows: NDArray[np.integer], pending: float, most_rows: int) -> NDArray[np.bool_]:
        """Which experts the threads compute, those of the fewest tokens, so that the slower one of
        threads and link has ended as early as possible. Equal splits: the one with fewer experts.

        Args:
            rows: [N] tokens of each expert; those without any are in neither lane.
            pending: seconds of copies for which the link is busy before it begins with these.
            most_rows: of all experts of the threads together.

        Returns:
            [N] bool.
        """
        order = np.argsort(rows, kind="stable")
        order = order[rows[order] > 0]
        summed = np.concatenate(([0], np.cumsum(rows[order], dtype=np.int64)))
        counts = np.arange(len(order) + 1)
        threads = self.exchange * (counts > 0) + counts * self.expert + summed * self.row
        ends = np.maximum(threads, pending + (len(order) - counts) * self.link)
        ends[summed > most_rows] = np.inf
        chosen = np.zeros(len(rows), np.bool_)
        chosen[order[: int(ends.argmin())]] = True
        return chosen


def fit_lane_costs(
    layer_seconds: Mapping[int, float],
    *,
    on_host: int,
    num_experts: int,
    experts_per_token: int,
    link_seconds: float,
    slowdown: float = 1.0,
) -> LaneCosts:
    """Costs from a layer's exchanges with random experts, by least squares without negative terms.

    Args:
        layer_seconds: see `with_host_experts`.
        on_host: experts of that layer that the threads compute.
        num_experts: of the layer.
        experts_per_token: all different, drawn at random.
        link_seconds: of bringing all of the layer's host experts.
        slowdown: of the threads while the link reads host memory, too; 1 or more.
    """
    assert layer_seconds and on_host > 0
    tokens = np.array(sorted(layer_seconds), float)
    seconds = np.array([layer_seconds[int(count)] for count in tokens])
    chosen = experts_per_token / num_experts
    read = on_host * (1.0 - (1.0 - chosen) ** tokens)
    terms = np.stack((np.ones_like(tokens), read, tokens * chosen * on_host), axis=1)
    best, least = np.zeros(3), np.inf
    for count in (1, 2, 3):
        for used in combinations(range(3), min(count, len(tokens))):
            found, *_ = np.linalg.lstsq(terms[:, used], seconds, rcond=None)
            error = float(((terms[:, used] @ found - seconds) ** 2).sum())
            if (found >= 0).all() and error < least:
                best, least = np.zeros(3), error
                best[list(used)] = found
    exchange, expert, row = (best * max(slowdown, 1.0)).tolist()
    return LaneCosts(exchange, expert, row, link_seconds / on_host)


LINKED_SIZES = (1, 4, 16)
"""Tokens of a step for which the link's part is measured; a step takes the next larger size."""

LEAST_ON_HOST = 0.05
"""Share of all experts: below it nearly all steps miss no expert, and two kernels more in each
layer cost more than the link's part saves."""

_SHARES = (0.15, 0.55)
"""Of an expert's inner rows, or of the experts: threads and link are about as fast (107 and 50 GB/s
were measured, 74 and 49 at once)."""
_CANDIDATES, _LEAST_GAIN = 4, 0.03


def linked_rows(inner: int, unit: int) -> tuple[int, ...]:
    """How many inner rows of each expert the link's part may have, ascending; a few numbers.

    Args:
        inner: rows of an expert.
        unit: of the rows that are not the link's.
    """
    low, high = (share * inner for share in _SHARES)
    found = [n for n in range(inner % unit or unit, inner, unit) if low <= n <= high]
    step = -(-len(found) // _CANDIDATES) if found else 1
    return tuple(found[::step])


def linked_wholes(wholes: int) -> tuple[int, ...]:
    """How many parts out of `wholes` of all experts the link may have, ascending; a few numbers.
    Shares are rounded down to experts: 0.26 gives it one of four, 0.34 one of three."""
    return tuple(math.ceil(share * wholes) for share in (0.26, 0.34, 0.41, 0.51))


def paying_parts(seconds: Mapping[Part, float], none: Part) -> list[Part]:
    """The parts of the link that save 3% over none.

    Args:
        seconds: part -> time of a layer.
        none: the part that is nothing; in `seconds`.
    """
    most = (1.0 - _LEAST_GAIN) * seconds[none]
    return [part for part, time in seconds.items() if time <= most]


def choose_linked(random: Mapping[Part, float], one_miss: Mapping[Part, float], none: Part) -> Part:
    """The part of the link that small steps have: one that saves 3% over none if tokens choose
    experts at random, and loses nothing if each misses one.

    Args:
        random: part -> time of a layer, tokens that choose at random; `none` is in it.
        one_miss: the same of tokens that miss one expert each, for `none` and all parts that save
            3% by `random`; empty: no such times, and those of `random` decide.
        none: the part that is nothing.
    """
    kinds = [seconds for seconds in (random, one_miss) if seconds]

    def least_gain(part: Part) -> float:
        return min(1.0 - seconds[part] / seconds[none] for seconds in kinds)

    # Most steps miss more than one expert a token and fewer than random routes do, so a part is as
    # good as its smaller gain. No tolerance for noise: it would admit parts that gain nothing.
    best = max(paying_parts(random, none), key=least_gain, default=none)
    return best if least_gain(best) >= 0.0 else none
