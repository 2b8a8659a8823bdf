"""Runs a draft model's steps with plain torch, if there is no compiler or the executor does not
support the model. Same results as `Executor.run` with candidates."""

from __future__ import annotations

import numpy as np
import torch

from hetero_llm.cpu.draft_worker.kv_layout import BLOCK, KVLayout, StepSize
from hetero_llm.cpu.executor import Candidates
from hetero_llm.cpu.paged_attention import native_row_kernel
from hetero_llm.models.config import ModelConfig
from hetero_llm.models.layers import CausalLM
from hetero_llm.runner.attention import TorchPagedAttention
from hetero_llm.runner.scored_attention import Scoring
from hetero_llm.sampling.noise import gumbel_noise
from hetero_llm.spec_decode.verify import TreeTokens


class TorchPath:
    """Runs the steps that `KVLayout.fill` lays out.

    Args:
        model: on the CPU.
        config: its configuration.
        found: output: the most likely tokens of each sample.
    """

    def __init__(
        self, model: CausalLM, config: ModelConfig, kv_layout: KVLayout, found: Candidates
    ) -> None:
        self._model, self._kv_layout, self._found = model, kv_layout, found
        cache = kv_layout.cache
        kernel = native_row_kernel(cache, config.num_heads, Scoring.of(config))
        self._attention = TorchPagedAttention(config, cache, row_by_row=False, row_kernel=kernel)

    @torch.inference_mode()
    def run(self, size: StepSize) -> None:
        arrays = self._kv_layout.arrays
        rows, sequences, samples = slice(size.rows), slice(size.sequences), slice(size.samples)
        starts, counts = arrays.starts[sequences], arrays.counts[sequences]
        firsts = np.cumsum(counts) - counts
        places = np.arange(size.rows, dtype=np.int32) + np.repeat(starts - firsts, counts)
        trees = TreeTokens(
            arrays.token_ids[rows], places, places, arrays.ancestors[rows],
            arrays.is_tree[sequences], [], [], arrays.bases[sequences],
        )  # fmt: skip
        blocks = arrays.slot_mapping[rows] // BLOCK
        tables = self._kv_layout.block_tables[arrays.slots[sequences]]
        attend = self._attention.plan(starts, counts, tables, places, blocks, trees)
        token_ids, positions, after, at, indices = (
            torch.from_numpy(values.astype(np.int64))
            for values in (
                arrays.token_ids[rows], arrays.positions[rows], arrays.sample_rows[samples],
                arrays.sample_positions[samples], arrays.sample_indices[samples],
            )
        )  # fmt: skip
        hidden = self._model(token_ids, positions, attend)
        scores = self._model.logits(hidden[after]).float()
        temperatures = torch.from_numpy(arrays.temperatures[samples])
        noisy = temperatures > 0
        if noisy.any():
            seeds = torch.from_numpy(arrays.seeds[samples].view(np.int64))[noisy]
            noise = gumbel_noise(seeds, at[noisy], indices[noisy], scores.shape[1])
            scores[noisy] = scores[noisy] / temperatures[noisy].unsqueeze(1) + noise
        log_probs = scores.log_softmax(1).numpy()
        likeliest(log_probs, self._found.tokens[samples], self._found.log_probs[samples])


def likeliest(scores: np.ndarray, tokens: np.ndarray, best: np.ndarray) -> None:
    """Write the K highest scores of each row of `scores`, [R, vocab], to `best` and their tokens to
    `tokens`, both [R, K]; -1 and -inf where there are fewer. See `Candidates`."""
    count = tokens.shape[1]
    tokens[:], best[:] = -1, -np.inf
    least = np.partition(scores, scores.shape[1] - count, axis=1)[:, -count]
    for row, limit in enumerate(least):
        high = np.flatnonzero((scores[row] >= limit) & (scores[row] > -np.inf))
        high = high[np.argsort(-scores[row, high], kind="stable")[:count]]
        tokens[row, : len(high)], best[row, : len(high)] = high, scores[row, high]
