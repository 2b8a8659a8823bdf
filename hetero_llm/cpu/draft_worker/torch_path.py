"""A draft model's steps through plain torch: where there is no compiler, or the executor does not
know the model. Twin: `Executor.candidates`."""

from __future__ import annotations

import numpy as np
import torch

from hetero_llm.cpu.draft_worker.kv_layout import BLOCK, Pages, StepSize
from hetero_llm.cpu.executor import Candidates
from hetero_llm.cpu.paged_attention import native_row_kernel
from hetero_llm.models.config import ModelConfig
from hetero_llm.models.layers import CausalLM
from hetero_llm.runner.attention import TorchPagedAttention
from hetero_llm.runner.scored_attention import Scoring
from hetero_llm.sampling.noise import gumbel_noise
from hetero_llm.spec_decode.verify import TreeTokens


class TorchPath:
    """Runs the steps that `Pages` lays out.

    Args:
        model: on the CPU. config: its configuration.
        found: where the likeliest tokens after each draw's row go.
    """

    def __init__(
        self, model: CausalLM, config: ModelConfig, pages: Pages, found: Candidates
    ) -> None:
        self._model, self._pages, self._found = model, pages, found
        cache = pages.cache
        kernel = native_row_kernel(cache, config.num_heads, Scoring.of(config))
        self._attention = TorchPagedAttention(config, cache, row_by_row=False, row_kernel=kernel)

    @torch.inference_mode()
    def run(self, size: StepSize) -> None:
        arrays = self._pages.arrays
        rows, sequences, draws = slice(size.rows), slice(size.sequences), slice(size.draws)
        starts, counts = arrays.starts[sequences], arrays.counts[sequences]
        firsts = np.cumsum(counts) - counts
        places = np.arange(size.rows, dtype=np.int32) + np.repeat(starts - firsts, counts)
        trees = TreeTokens(
            arrays.token_ids[rows], places, places, arrays.ancestors[rows],
            arrays.is_tree[sequences], [], [], arrays.bases[sequences],
        )  # fmt: skip
        blocks = arrays.cache_rows[rows] // BLOCK
        tables = self._pages.tables[arrays.slots[sequences]]
        attend = self._attention.plan(starts, counts, tables, places, blocks, trees)
        token_ids, positions, after, at, indices = (
            torch.from_numpy(values.astype(np.int64))
            for values in (
                arrays.token_ids[rows], arrays.positions[rows], arrays.draw_rows[draws],
                arrays.draw_positions[draws], arrays.sample_indices[draws],
            )
        )  # fmt: skip
        hidden = self._model(token_ids, positions, attend)
        scores = self._model.logits(hidden[after]).float()
        temperatures = torch.from_numpy(arrays.temperatures[draws])
        noisy = temperatures > 0
        if noisy.any():
            seeds = torch.from_numpy(arrays.seeds[draws].view(np.int64))[noisy]
            noise = gumbel_noise(seeds, at[noisy], indices[noisy], scores.shape[1])
            scores[noisy] = scores[noisy] / temperatures[noisy].unsqueeze(1) + noise
        log_probs = scores.log_softmax(1).numpy()
        likeliest(log_probs, self._found.tokens[draws], self._found.log_probs[draws])


def likeliest(scores: np.ndarray, tokens: np.ndarray, best: np.ndarray) -> None:
    """The K highest of each row of scores [R, vocab] and their tokens, see `Candidates`: tokens
    and best [R, K] are written."""
    count = tokens.shape[1]
    tokens[:], best[:] = -1, -np.inf
    least = np.partition(scores, scores.shape[1] - count, axis=1)[:, -count]
    for row, limit in enumerate(least):
        high = np.flatnonzero((scores[row] >= limit) & (scores[row] > -np.inf))
        high = high[np.argsort(-scores[row, high], kind="stable")[:count]]
        tokens[row, : len(high)], best[row, : len(high)] = high, scores[row, high]
