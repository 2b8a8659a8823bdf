"""Measures at start how long steps of the draft model take."""

from __future__ import annotations

import time

import numpy as np

from hetero_llm.core.step_times import StepTimes, extend_profile
from hetero_llm.cpu.draft_worker.draft_model import DraftModel
from hetero_llm.cpu.draft_worker.kv_layout import no_tree_nodes
from hetero_llm.cpu.draft_worker.tree_ops import WINDOW

SIZES = (1, 2, 4, 8, 16, 24, 32, 48, 64)
"""Rows of the steps that are measured."""
MOST_TOKENS = 8 * WINDOW
"""Of a step; larger ones are predicted to take as long."""

_REPEATS = 5


def measure(model: DraftModel, slots: int, context: int) -> StepTimes:
    """Times steps of a model that holds no text; it holds none afterwards. The predictor reaches to
    steps of `MOST_TOKENS` tokens; none is cheaper than a smaller one.

    Every row is a text of its own of `context` tokens, or several of one where slots are few.
    """
    sizes, seconds = [], []
    repeats = min(_REPEATS, model.max_positions - 1)
    if not repeats:  # a text of one token has no draft
        return StepTimes([1], [1.0])
    full = np.arange(max(context, SIZES[-1]), dtype=np.int32) % model.vocab_size
    for size in SIZES:
        texts = min(size, slots)
        rows = -(-size // texts)
        if rows > 1 and (repeats + 1) * rows > model.max_positions:
            continue  # beyond what is measured it is a straight line
        text = full[: max(1, min(context, model.max_positions - repeats * rows))]
        for slot in range(texts):
            model.kv_layout.open(slot, text)
            _run(model)
        times = []
        for _ in range(repeats):
            for slot in range(texts):
                model.kv_layout.append(slot, full[:rows])
            begin = time.perf_counter()
            _run(model)
            times.append(time.perf_counter() - begin)
        for slot in range(texts):
            model.kv_layout.close(slot)
        sizes.append(texts * rows)
        seconds.append(min(times))
    keep = [i for i, size in enumerate(sizes) if i == 0 or size > sizes[i - 1]]
    rising = np.maximum.accumulate([seconds[i] for i in keep]).tolist()
    return StepTimes(*extend_profile([sizes[i] for i in keep], rising, [MOST_TOKENS]))


def _run(model: DraftModel) -> None:
    """Runs whatever is pending."""
    while len((prefix := model.kv_layout.plan_prefix(model.most_rows)).slots):
        model.step(prefix, no_tree_nodes())
