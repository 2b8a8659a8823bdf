"""What steps cost on this device, by the graphs that will run: for whoever weighs draft nodes.

Measured once after capture, on inputs without a sequence: attention over long contexts comes on
top, and steps that really run tell by how much.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeVar

import torch

from hetero_llm.gpu.graph_set import GraphSet

K = TypeVar("K")

_REPLAYS = 3


def profile_graphs(graphs: GraphSet[K], keys: Sequence[tuple[int, K]]) -> list[tuple[int, float]]:
    """Seconds of each graph beside its rows.

    Waits for the device. The graphs run as they were captured, with whatever is in their inputs.

    Args:
        keys: rows and key of each graph, in the order of the result.
    """
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    profile = []
    for rows, key in keys:
        graphs.replay(key)  # the first replay loads the graph
        times = []
        for _ in range(_REPLAYS):
            begin.record()
            graphs.replay(key)
            end.record()
            end.synchronize()
            times.append(begin.elapsed_time(end) * 1e-3)
        profile.append((rows, min(times)))  # one of two once took twice its time
    return profile
