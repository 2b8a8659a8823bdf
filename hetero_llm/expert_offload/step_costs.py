"""Seconds of steps by number of tokens, where some experts run on the host.

Graphs are timed by replays whose tokens are padding, and padding asks for no experts. The draft
budget (`spec_decode.budget`) would take more tokens for nearly free, while each wakes experts in
host memory.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np


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
