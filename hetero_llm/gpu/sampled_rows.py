"""Plans the last layer of a step with prompt chunks: only for the tokens that are sampled after.

The last layer stores keys and values of every token. What it computes beyond that is read only
where the step samples: after the last token of a chunk, if at all. So its attention, output
projection and MLP run for those rows alone, with an attention work list of their own. In a model of
32 layers that saves nearly 1/32 of a long prompt's arithmetic.
"""

from __future__ import annotations

import numpy as np

from hetero_llm.core.step import SchedulerOutput
from hetero_llm.gpu.attention_context import AttentionContext
from hetero_llm.gpu.attention_plan import plan_work
from hetero_llm.gpu.graph_set import is_short
from hetero_llm.gpu.kernels.paged_attention import CUT_ROW_FIELDS, WORK_FIELDS, RowMasks, Work
from hetero_llm.gpu.paged_attention import PlannedRows, SampledRows
from hetero_llm.gpu.uploads import Uploads

_ALIGNED = 4  # words: kernels are compiled for arrays that begin at multiples of 16 bytes


class SampledRowsPlanner:
    """
    Args:
        max_samples: most samples of a step that are sent without waiting.
    """

    def __init__(self, context: AttentionContext, max_samples: int) -> None:
        self._context = context
        words = WORK_FIELDS * (max_samples + context.max_pieces) + CUT_ROW_FIELDS * max_samples
        words += 3 * (max_samples + _ALIGNED) + _ALIGNED
        self._uploads = Uploads(words, context.block_tables.device)

    def plan(self, step: SchedulerOutput) -> SampledRows:
        """One row for each sample of a step without drafts: a token that is sampled after several
        times is there as often. If the step samples nothing, its last token stands for a row, since
        kernels are not launched on none."""
        context, layer = self._context, self._context.config.num_layers - 1
        times = step.num_samples.copy()
        if not times.any():
            times[-1] = 1
        slots = np.repeat(step.request_slots, times)
        positions = np.repeat(step.num_computed_tokens + step.num_scheduled_tokens - 1, times)
        rows = np.repeat(np.cumsum(step.num_scheduled_tokens) - 1, times)
        short = is_short(positions + 1, context)
        tile = context.decode_tile(len(rows), short=short)
        window, limits = context.config.sliding_windows[layer], context.limits(tile, cut=not short)
        items, cut_rows = plan_work(slots, positions, np.ones_like(positions), None, window, limits)
        counts = np.array([len(items), len(cut_rows)])
        parts = [part.ravel() for part in (items, cut_rows, counts, positions + 1, positions, rows)]
        sent = self._uploads.send(_joined(parts))
        views, begin = [], 0
        for part in parts:
            views.append(sent[begin : begin + len(part)])
            begin += -(-len(part) // _ALIGNED) * _ALIGNED
        work = Work(views[0].view(-1, WORK_FIELDS), views[1].view(-1, CUT_ROW_FIELDS), views[2])
        masks, workspace = RowMasks(views[3], views[4]), context.workspace(tile)
        planned = PlannedRows(masks, work, workspace, tile, len(cut_rows) > 0)
        return SampledRows(layer, views[5].long(), planned)


def _joined(parts: list[np.ndarray]) -> np.ndarray:
    """Arrays one after the other as int32, each at a multiple of `_ALIGNED`."""
    padded = [np.pad(part, (0, -len(part) % _ALIGNED)) for part in parts]
    return np.concatenate(padded).astype(np.int32)
