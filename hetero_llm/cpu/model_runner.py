"""Runs steps through the native executor, draft trees included.

Greedy and temperature-only draws happen in the library, where the logits stay. A step in which
any sequence wants more (thresholds, penalties, users' processors, log-probabilities) brings the
logits of its drawn rows to the torch sampler. Twin: `runner.model_runner.TorchModelRunner`.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
import torch

from hetero_llm.core.draft import DraftBatch
from hetero_llm.core.step import (
    LAST_DRAWN,
    ModelRunnerOutput,
    SampleLogprobs,
    SchedulerOutput,
    SlotState,
    looks_back,
)
from hetero_llm.cpu.draft_trees import TreeRows, tree_rows, walk_tree
from hetero_llm.cpu.executor import GREEDY, LOGITS_ONLY, NOISY, Executor, StepDraws, StepRows
from hetero_llm.cpu.step_buffers import StepBuffers
from hetero_llm.models.config import ModelConfig
from hetero_llm.runner.kv_cache import PagedKVCache
from hetero_llm.runner.model_runner import PendingStep, observe_inputs, plain_output
from hetero_llm.sampling.sampler import Sampler, SampleResult, token_logprobs

_PROMPT_LOGPROB_ROWS = 256
"""Rows of full-vocabulary logits held at once for prompt_logprobs."""
_SEED_MASK = (1 << 64) - 1


@dataclass(frozen=True, slots=True)
class _DrawnRows:
    """The rows that a step draws after, in order.

    Attributes:
        owners: [N] index of the scheduled sequence. rows: [N] row of the step.
        samples: [N] draws from the row; more than one take sample indices 0, 1, ...
    """

    owners: np.ndarray
    rows: np.ndarray
    samples: np.ndarray


class NativeModelRunner:
    """Owns the KV cache, the block tables and the sampling state of every slot.

    Args:
        executor: holds the model's weights and works on `cache`.
        config: the model's configuration.
        cache: the paged KV cache in host memory.
        max_num_seqs: slots.
        max_model_len: longest sequence, in tokens.
        max_num_batched_tokens: most rows of a step.
    """

    def __init__(
        self,
        executor: Executor,
        config: ModelConfig,
        cache: PagedKVCache,
        *,
        max_num_seqs: int,
        max_model_len: int,
        max_num_batched_tokens: int,
    ) -> None:
        self._executor = executor
        self._cache = cache
        columns = -(-max_model_len // cache.shape.block_size)
        self._tables = np.zeros((max_num_seqs, columns), np.int32)
        self._sampler = Sampler(max_num_seqs, config.vocab_size, torch.device("cpu"))
        self._sampling = StepDraws(  # of every slot
            rows=np.zeros(max_num_seqs, np.int32),
            modes=np.zeros(max_num_seqs, np.uint8),
            temperatures=np.ones(max_num_seqs, np.float32),
            seeds=np.zeros(max_num_seqs, np.uint64),
            positions=np.zeros(max_num_seqs, np.int32),
            sample_indices=np.zeros(max_num_seqs, np.int32),
        )
        self._buffers = StepBuffers(max_num_batched_tokens, max_num_seqs, self._tables)
        buffers = self._buffers
        self._prepared = executor.prepare(buffers.rows, buffers.draws, buffers.tokens)
        self._prompts: dict[int, SlotState] = {}  # of slots that want prompt_logprobs

    @torch.inference_mode()
    def launch(self, step: SchedulerOutput) -> ModelRunnerOutput:
        """Runs a step to its end: there is no device to leave it to."""
        assert LAST_DRAWN not in step.token_ids, "steps follow each other, so tokens are known"
        self._apply_changes(step)
        if step.drafts is not None:
            return self._verify(step, step.drafts)
        if not step.prompt_rows and not self._sampler.has_history:
            draws = self._buffers.fill(step, self._sampling, self._cache.shape.block_size)
            if draws is not None:
                return self._run_plain(step, draws)
        if self._sampler.has_history:
            observe_inputs(self._sampler, step)
        rows = self._rows(step, None)
        owners = np.flatnonzero(step.num_samples)
        last = (np.cumsum(step.counts) - 1)[owners]
        drawn = _DrawnRows(owners, last, step.num_samples[owners])
        if step.prompt_rows:
            return self._with_prompt_logprobs(step, rows, drawn)
        token_ids, result = self._run(step, rows, drawn)
        return plain_output(token_ids, PendingStep(step, result, []))

    def finish(self, pending: ModelRunnerOutput) -> ModelRunnerOutput:
        """The results of a launched step."""
        return pending

    def _run_plain(self, step: SchedulerOutput, draws: int) -> ModelRunnerOutput:
        """Runs the step that the buffers hold."""
        self._executor.run(self._prepared, len(step.token_ids), len(step.slots), draws)
        return ModelRunnerOutput(self._buffers.tokens[:draws].tolist(), None, {}, {})

    def _apply_changes(self, step: SchedulerOutput) -> None:
        for state in step.admitted:
            self._admit(state)
        writes = step.table_writes
        if writes.shape[1]:
            self._tables[writes[0], writes[1]] = writes[2]
        copies = step.block_copies
        if copies.shape[1]:
            self._cache.copy_blocks(list(zip(*copies.tolist(), strict=True)))

    def _admit(self, state: SlotState) -> None:
        slot, params = state.slot, state.params
        self._sampler.admit(state)
        restricts = params.top_k > 0 or params.top_p < 1.0 or params.min_p > 0.0
        if state.num_logprobs is not None or looks_back(
            params, state.banned_end_ids, state.bad_word_ids
        ):
            self._sampling.modes[slot] = LOGITS_ONLY
        elif params.greedy:
            self._sampling.modes[slot] = GREEDY
        else:
            self._sampling.modes[slot] = LOGITS_ONLY if restricts else NOISY
        self._sampling.temperatures[slot] = 1.0 if params.greedy else params.temperature
        self._sampling.seeds[slot] = state.seed & _SEED_MASK
        self._sampling.sample_indices[slot] = state.sample_index
        if params.prompt_logprobs is not None:
            self._prompts[slot] = state

    # -- rows and draws ---------------------------------------------------------------------

    def _rows(self, step: SchedulerOutput, trees: TreeRows | None) -> StepRows:
        slots, counts = step.slots, step.counts
        size = np.int32(self._cache.shape.block_size)
        total = int(counts.sum())
        if total == len(slots):  # one row each
            places, owners = step.starts, slots
        else:
            before = (np.cumsum(counts) - counts - step.starts).astype(np.int32)
            places = np.arange(total, dtype=np.int32) - np.repeat(before, counts)
            owners = np.repeat(slots, counts)
        positions = places
        if trees is not None:
            starts = np.repeat(step.starts, counts)
            in_tree = np.repeat(trees.is_tree, counts) > 0
            positions = np.where(in_tree, starts + trees.depths, places)
        return StepRows(
            token_ids=step.token_ids if trees is None else trees.token_ids,
            positions=positions,
            cache_rows=self._tables[owners, places // size] * size + places % size,
            slots=slots,
            starts=step.starts,
            counts=counts,
            is_tree=np.zeros(len(slots), np.uint8) if trees is None else trees.is_tree,
            ancestors=np.zeros(total, np.uint64) if trees is None else trees.ancestors,
            tables=self._tables,
        )

    def _run(
        self, step: SchedulerOutput, rows: StepRows, drawn: _DrawnRows
    ) -> tuple[list[int], SampleResult | None]:
        """Runs a step; the result is the torch sampler's, if that is needed."""
        slots = step.slots[drawn.owners]
        if (self._sampling.modes[slots] == LOGITS_ONLY).any():
            return self._sample(step, rows, drawn, self._executor.logits(rows, drawn.rows))
        sampled, indices = drawn.rows, self._sampling.sample_indices[slots]
        if (drawn.samples > 1).any():  # a prompt's end that forks
            source = np.repeat(np.arange(len(slots)), drawn.samples)
            firsts = np.cumsum(drawn.samples) - drawn.samples
            within = np.arange(len(source)) - firsts[source]
            indices = np.where(drawn.samples[source] > 1, within, indices[source])
            slots, sampled = slots[source], sampled[source]
        draws = StepDraws(
            rows=sampled.astype(np.int32),
            modes=self._sampling.modes[slots],
            temperatures=self._sampling.temperatures[slots],
            seeds=self._sampling.seeds[slots],
            positions=rows.positions[sampled] + np.int32(1),
            sample_indices=indices.astype(np.int32),
        )
        return self._executor.step(rows, draws).tolist(), None

    def _sample(
        self, step: SchedulerOutput, rows: StepRows, drawn: _DrawnRows, logits: torch.Tensor
    ) -> tuple[list[int], SampleResult | None]:
        """Draws by the torch sampler from the drawn rows' logits [N, vocab]."""
        if len(drawn.rows) == 0:
            return [], None
        positions = rows.positions[drawn.rows] + 1
        result = self._sampler.sample(logits, step.slots[drawn.owners], positions, drawn.samples)
        return result.token_ids.tolist(), result

    # -- draft trees ------------------------------------------------------------------------

    def _verify(self, step: SchedulerOutput, drafts: DraftBatch) -> ModelRunnerOutput:
        """Draws after every row of every tree, walks the trees and closes the gaps in the KV."""
        trees = tree_rows(step, drafts)
        rows = self._rows(step, trees)
        is_tree = trees.is_tree > 0
        ends = np.cumsum(step.counts)
        firsts = np.where(is_tree, ends - step.counts, ends - 1)
        counts = np.where(is_tree, step.counts, np.minimum(step.num_samples, 1))
        owners = np.repeat(np.arange(len(counts)), counts)
        within = np.arange(len(owners)) - (np.cumsum(counts) - counts)[owners]
        samples = np.where(is_tree, 1, step.num_samples)[owners]
        token_ids, _ = self._run(step, rows, _DrawnRows(owners, firsts[owners] + within, samples))
        num_drawn = np.where(is_tree, step.counts, step.num_samples).tolist()
        return self._accept(rows, trees, token_ids, num_drawn)

    def _accept(
        self, rows: StepRows, trees: TreeRows, drawn: list[int], num_drawn: list[int]
    ) -> ModelRunnerOutput:
        """Walks the trees and moves the accepted nodes' KV behind their roots'.

        Args:
            drawn: all tokens drawn, `num_drawn` for each sequence.
        """
        kept: list[int] = []
        num_tokens: list[int] = []
        sources: list[np.ndarray] = []
        targets: list[np.ndarray] = []
        own = trees.token_ids.tolist()
        parents = iter(trees.parents)
        row = at = 0
        for is_tree, count, draws in zip(
            trees.is_tree.tolist(), rows.counts.tolist(), num_drawn, strict=True
        ):
            tokens = drawn[at : at + draws]
            if is_tree:
                path = walk_tree(tokens, own[row : row + count], next(parents))
                tokens = [tokens[index] for index in path]
                if path[-1] >= len(path):
                    sources.append(rows.cache_rows[row + np.array(path)])
                    targets.append(rows.cache_rows[row : row + len(path)])
            kept += tokens
            num_tokens.append(len(tokens))
            row, at = row + count, at + draws
        if sources:
            self._move(np.concatenate(sources), np.concatenate(targets))
        return ModelRunnerOutput(kept, None, {}, {}, num_tokens)

    def _move(self, sources: np.ndarray, targets: np.ndarray) -> None:
        """Copies K and V between KV slots in all layers; everything is read first."""
        size, data = self._cache.shape.block_size, self._cache.data
        source, target = torch.from_numpy(sources).long(), torch.from_numpy(targets).long()
        kept = data[source // size, :, :, source % size]  # [moves, layers, 2, kv_heads, dim]
        data[target // size, :, :, target % size] = kept

    # -- log-probabilities of prompts -------------------------------------------------------

    def _with_prompt_logprobs(
        self, step: SchedulerOutput, rows: StepRows, drawn: _DrawnRows
    ) -> ModelRunnerOutput:
        """Runs the rows in pieces, so that no more logits than those of the drawn rows and
        `_PROMPT_LOGPROB_ROWS` others are held at once."""
        wanted, targets, counts = self._prompt_targets(step)
        logits: list[torch.Tensor] = []
        found: list[SampleLogprobs] = []
        limits = [0, *wanted[_PROMPT_LOGPROB_ROWS::_PROMPT_LOGPROB_ROWS], len(rows.token_ids)]
        for low, high in zip(limits[:-1], limits[1:], strict=True):
            first, last = np.searchsorted(wanted, (low, high)).tolist()
            own = drawn.rows[(drawn.rows >= low) & (drawn.rows < high)]
            after = np.concatenate((own, wanted[first:last])) - low
            values = self._executor.logits(_part_of(rows, low, high), after)
            logits.append(values[: len(own)].clone())
            asked = values[len(own) :]
            found += token_logprobs(asked, targets[first:last], counts[first:last]).to_host()
        token_ids, result = self._sample(step, rows, drawn, torch.cat(logits))
        output = plain_output(token_ids, PendingStep(step, result, []))
        by_slot: dict[int, list[SampleLogprobs]] = {}
        begin = 0
        for part in step.prompt_rows:
            by_slot[int(step.slots[part.index])] = found[begin : begin + part.count]
            begin += part.count
        return replace(output, prompt_logprobs=by_slot)

    def _prompt_targets(self, step: SchedulerOutput) -> tuple[np.ndarray, torch.Tensor, list[int]]:
        """Of every wanted prompt row: the row, the token after it, how many of the most likely."""
        firsts = np.cumsum(step.counts) - step.counts
        rows: list[np.ndarray] = []
        targets: list[int] = []
        counts: list[int] = []
        for part in step.prompt_rows:
            state = self._prompts[int(step.slots[part.index])]
            following = int(step.starts[part.index]) + part.first + 1
            rows.append(firsts[part.index] + part.first + np.arange(part.count))
            targets += state.token_ids[following : following + part.count]
            counts += [state.num_prompt_logprobs] * part.count
        joined = np.concatenate(rows)
        assert (joined[1:] > joined[:-1]).all(), "parts come in the order of their sequences"
        return joined, torch.tensor(targets), counts


def _part_of(rows: StepRows, low: int, high: int) -> StepRows:
    """Rows low .. high - 1 of a step without trees; those before have their KV in the cache."""
    ends = np.cumsum(rows.counts)
    firsts = ends - rows.counts
    chosen = (ends > low) & (firsts < high)
    begins, stops = np.maximum(firsts[chosen], low), np.minimum(ends[chosen], high)
    return StepRows(
        token_ids=rows.token_ids[low:high],
        positions=rows.positions[low:high],
        cache_rows=rows.cache_rows[low:high],
        slots=rows.slots[chosen],
        starts=(rows.starts[chosen] + begins - firsts[chosen]).astype(np.int32),
        counts=(stops - begins).astype(np.int32),
        is_tree=rows.is_tree[chosen],
        ancestors=rows.ancestors[low:high],
        tables=rows.tables,
    )
