"""How many bytes of GPU memory are left for the KV cache."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch

from hetero_llm.core.config import SchedulerConfig
from hetero_llm.core.sampling_params import SamplingParams
from hetero_llm.core.step import SchedulerOutput, SlotState
from hetero_llm.runner.kv_cache import KVCacheShape
from hetero_llm.runner.model_runner import TorchModelRunner


def free_bytes_for_cache(
    runner_with: Callable[[int], TorchModelRunner],
    config: SchedulerConfig,
    shape: KVCacheShape,
    utilization: float,
) -> int:
    """Runs the largest step once and returns what its peak leaves of the allowed memory.

    Args:
        runner_with: builds a runner with a cache of so many blocks.
        utilization: share of the card's memory that the process may use in all.
    """
    step = _largest_step(config)
    runner = runner_with(int(step.table_writes[2].max()) + 1)
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    runner.finish(runner.launch(step))
    torch.cuda.synchronize()
    activations = torch.cuda.max_memory_allocated() - before
    del runner
    torch.cuda.empty_cache()
    free, total = torch.cuda.mem_get_info()
    return int(free - total * (1.0 - utilization)) - activations


def _largest_step(config: SchedulerConfig) -> SchedulerOutput:
    """A step that fills the token budget with prompts of equal length, each drawing a token."""
    budget = config.max_num_batched_tokens
    length = min(config.max_model_len - 1, budget)
    sequences = max(1, min(config.max_num_seqs, budget // length))
    per_sequence = -(-length // config.block_size)
    params = SamplingParams(temperature=1.0, top_p=0.9, seed=0)
    counts = np.full(sequences, length, np.int32)
    slots = np.arange(sequences, dtype=np.int32)
    columns = np.tile(np.arange(per_sequence, dtype=np.int32), sequences)
    blocks = np.arange(sequences * per_sequence, dtype=np.int32)
    return SchedulerOutput(
        slots=slots,
        starts=np.zeros(sequences, np.int32),
        counts=counts,
        token_ids=np.zeros(int(counts.sum()), np.int32),
        num_samples=np.ones(sequences, np.int32),
        prompt_rows=(),
        admitted=tuple(SlotState(int(s), (0,), 1, params, 0, 0) for s in slots),
        table_writes=np.stack([np.repeat(slots, per_sequence), columns, blocks]),
        block_copies=np.zeros((2, 0), np.int32),
    )
