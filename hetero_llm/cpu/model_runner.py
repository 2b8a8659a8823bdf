"""Runs steps through the native executor, draft trees included.

Greedy and temperature-only draws happen in the library, where the logits stay. A step in which
any sequence wants more (thresholds, penalties, users' processors, log-probabilities) brings the
logits of its drawn rows to the torch sampler, and its draft trees are walked by depth
(`runner.verify`). Twin: `runner.model_runner.TorchModelRunner`.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from itertools import accumulate

import numpy as np
import torch

from hetero_llm.core.acceptance import TypicalAcceptance
from hetero_llm.core.step import (
    LAST_SAMPLED,
    AdmittedSequence,
    ModelRunnerOutput,
    SampleLogprobs,
    SchedulerOutput,
    depends_on_history,
)
from hetero_llm.cpu.executor import GREEDY, LOGITS_ONLY, NOISY, Executor, StepDraws, StepRows
from hetero_llm.cpu.step_buffers import StepBuffers
from hetero_llm.cpu.step_profile import profile_executor
from hetero_llm.models.config import ModelConfig
from hetero_llm.runner.kv_cache import PagedKVCache
from hetero_llm.runner.model_runner import PendingStep, observe_inputs, plain_output
from hetero_llm.runner.verify import DraftedStep, verify
from hetero_llm.sampling.sampler import Sampler, token_logprobs
from hetero_llm.spec_decode.verify import TreeTokens, compact_kv, tree_tokens, verify_trees

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
        drafts: steps may hold draft nodes, so what steps cost is measured.

    Attributes:
        profile: rows and seconds of steps, ascending; empty without drafts.
        typical: see `runner.verify`; to be set before the first step.
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
        drafts: bool = False,
    ) -> None:
        self.profile = profile_executor(executor, cache) if drafts else []
        self.typical: TypicalAcceptance | None = None
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
        self._prompts: dict[int, AdmittedSequence] = {}  # of slots that want prompt_logprobs

    @torch.inference_mode()
    def launch(self, step: SchedulerOutput) -> ModelRunnerOutput:
        """Runs a step to its end: there is no device to leave it to."""
        assert LAST_SAMPLED not in step.token_ids, "steps follow each other, so tokens are known"
        self._apply_changes(step)
        plain = not step.prompt_logprob_spans and not self._sampler.has_history
        if plain and step.drafts is None:
            draws = self._buffers.fill(step, self._sampling, self._cache.shape.block_size)
            if draws is not None:
                return self._run_plain(step, draws)
        if self._sampler.has_history:
            observe_inputs(self._sampler, step)
        trees = tree_tokens(step, step.drafts)
        rows = self._rows(step, trees)
        if step.drafts is not None:
            return self._verify(step, rows, trees)
        owners = np.flatnonzero(step.num_samples)
        last = (np.cumsum(step.num_scheduled_tokens) - 1)[owners]
        drawn = _DrawnRows(owners, last, step.num_samples[owners])
        if step.prompt_logprob_spans or self._needs_logits(step):
            logits, prompt_logprobs = self._logits(step, rows, drawn.rows)
            output = self._sample(step, rows, drawn, logits)
            return replace(output, prompt_logprobs=prompt_logprobs)
        return ModelRunnerOutput(self._draw(step, rows, drawn), None, {}, {})

    def finish(self, pending: ModelRunnerOutput) -> ModelRunnerOutput:
        """The results of a launched step."""
        return pending

    def _run_plain(self, step: SchedulerOutput, draws: int) -> ModelRunnerOutput:
        """Runs the step that the buffers hold."""
        self._executor.run(self._prepared, len(step.token_ids), len(step.request_slots), draws)
        return ModelRunnerOutput(self._buffers.tokens[:draws].tolist(), None, {}, {})

    def _apply_changes(self, step: SchedulerOutput) -> None:
        for state in step.admitted:
            self._admit(state)
        writes = step.block_table_writes
        if writes.shape[1]:
            self._tables[writes[0], writes[1]] = writes[2]
        copies = step.block_copies
        if copies.shape[1]:
            self._cache.copy_blocks(list(zip(*copies.tolist(), strict=True)))

    def _admit(self, state: AdmittedSequence) -> None:
        slot, params = state.request_slot, state.params
        self._sampler.admit(state)
        restricts = params.top_k > 0 or params.top_p < 1.0 or params.min_p > 0.0
        if state.num_logprobs is not None or depends_on_history(
            params, state.end_ids, state.bad_word_ids
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

    def _rows(self, step: SchedulerOutput, trees: TreeTokens) -> StepRows:
        size = np.int32(self._cache.shape.block_size)
        owners = np.repeat(step.request_slots, step.num_scheduled_tokens)
        indices = trees.kv_indices
        return StepRows(
            token_ids=trees.token_ids,
            positions=trees.positions,
            cache_rows=self._tables[owners, indices // size] * size + indices % size,
            slots=step.request_slots,
            starts=step.num_computed_tokens,
            counts=step.num_scheduled_tokens,
            bases=step.num_computed_tokens,
            is_tree=trees.is_tree,
            ancestors=trees.ancestors,
            tables=self._tables,
        )

    def _needs_logits(self, step: SchedulerOutput) -> bool:
        """Whether any draw of the step is not one of the library's."""
        modes = self._sampling.modes[step.request_slots[step.num_samples > 0]]
        return bool((modes == LOGITS_ONLY).any())

    def _draw(self, step: SchedulerOutput, rows: StepRows, drawn: _DrawnRows) -> list[int]:
        """Runs a step with the library's draws."""
        slots = step.request_slots[drawn.owners]
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
        tokens: list[int] = self._executor.step(rows, draws).tolist()
        return tokens

    def _sample(
        self, step: SchedulerOutput, rows: StepRows, drawn: _DrawnRows, logits: torch.Tensor
    ) -> ModelRunnerOutput:
        """Draws by the torch sampler from the drawn rows' logits [N, vocab]."""
        if len(drawn.rows) == 0:
            return ModelRunnerOutput([], None, {}, {})
        positions = rows.positions[drawn.rows] + 1
        result = self._sampler.sample(
            logits, step.request_slots[drawn.owners], positions, drawn.samples
        )
        return plain_output(result.token_ids.tolist(), PendingStep(step, result, []))

    # -- draft trees ------------------------------------------------------------------------

    def _verify(
        self, step: SchedulerOutput, rows: StepRows, trees: TreeTokens
    ) -> ModelRunnerOutput:
        """Draws after every row of every tree, walks the trees and closes the gaps in the KV."""
        is_tree = trees.is_tree > 0
        ends = np.cumsum(step.num_scheduled_tokens)
        firsts = np.where(is_tree, ends - step.num_scheduled_tokens, ends - 1)
        counts = np.where(is_tree, step.num_scheduled_tokens, np.minimum(step.num_samples, 1))
        owners = np.repeat(np.arange(len(counts)), counts)
        within = np.arange(len(owners)) - (np.cumsum(counts) - counts)[owners]
        after = firsts[owners] + within
        if step.prompt_logprob_spans or self.typical is not None or self._needs_logits(step):
            logits, prompt_logprobs = self._logits(step, rows, after)
            table = logits.numpy()

            def logits_after(visited: np.ndarray) -> torch.Tensor:
                return torch.from_numpy(table[np.searchsorted(after, visited)])

            drafted = DraftedStep(step, trees, rows.cache_rows, logits_after, [])
            output = verify(drafted, self._sampler, self._cache, typical=self.typical)
            return replace(output, prompt_logprobs=prompt_logprobs)
        samples = np.where(is_tree, 1, step.num_samples)[owners]
        token_ids = self._draw(step, rows, _DrawnRows(owners, after, samples))
        num_drawn = np.where(is_tree, step.num_scheduled_tokens, step.num_samples).tolist()
        return self._accept(step, trees, rows.cache_rows, token_ids, num_drawn)

    def _accept(
        self,
        step: SchedulerOutput,
        trees: TreeTokens,
        slot_mapping: np.ndarray,
        sampled: list[int],
        num_sampled: list[int],
    ) -> ModelRunnerOutput:
        """Verifies trees whose every node has been sampled after.

        Args:
            sampled: all tokens sampled, `num_sampled` for each sequence.
        """
        begins = [0, *accumulate(num_sampled[:-1])]

        def sample(reached: dict[int, int]) -> list[int | None]:
            return [sampled[begins[sequence] + node] for sequence, node in reached.items()]

        paths = verify_trees(step, trees, sample)
        compact_kv(step, paths, slot_mapping, self._cache.move_tokens)
        kept: list[int] = []
        num_tokens: list[int] = []
        for path, parents, begin, count in zip(
            paths, trees.parents, begins, num_sampled, strict=True
        ):
            own = sampled[begin : begin + count]
            tokens = [own[node] for node in path] if parents else own
            kept += tokens
            num_tokens.append(len(tokens))
        return ModelRunnerOutput(kept, None, {}, {}, num_tokens)

    # -- logits -----------------------------------------------------------------------------

    def _logits(
        self, step: SchedulerOutput, rows: StepRows, after: np.ndarray
    ) -> tuple[torch.Tensor, dict[int, list[SampleLogprobs]]]:
        """Runs a step for the logits [N, vocab] of its rows `after` [N], which ascend, and for the
        wanted log-probabilities of prompts by slot.

        With those it runs the rows in pieces, so that no more logits than those of the drawn rows
        and `_PROMPT_LOGPROB_ROWS` others are held at once. Pieces begin within prompts: a tree is
        never cut.
        """
        if not step.prompt_logprob_spans:
            return self._executor.logits(rows, after), {}
        wanted, targets, counts = self._prompt_targets(step)
        logits: list[torch.Tensor] = []
        found: list[SampleLogprobs] = []
        limits = [0, *wanted[_PROMPT_LOGPROB_ROWS::_PROMPT_LOGPROB_ROWS], len(rows.token_ids)]
        for low, high in zip(limits[:-1], limits[1:], strict=True):
            first, last = np.searchsorted(wanted, (low, high)).tolist()
            own = after[(after >= low) & (after < high)]
            places = np.concatenate((own, wanted[first:last])) - low
            values = self._executor.logits(_part_of(rows, low, high), places)
            logits.append(values[: len(own)].clone())
            asked = values[len(own) :]
            found += token_logprobs(asked, targets[first:last], counts[first:last]).to_host()
        by_slot: dict[int, list[SampleLogprobs]] = {}
        begin = 0
        for part in step.prompt_logprob_spans:
            by_slot[int(step.request_slots[part.index])] = found[begin : begin + part.count]
            begin += part.count
        return torch.cat(logits), by_slot

    def _prompt_targets(self, step: SchedulerOutput) -> tuple[np.ndarray, torch.Tensor, list[int]]:
        """Of every wanted prompt row: the row, the token after it, how many of the most likely."""
        firsts = np.cumsum(step.num_scheduled_tokens) - step.num_scheduled_tokens
        rows: list[np.ndarray] = []
        targets: list[int] = []
        counts: list[int] = []
        for part in step.prompt_logprob_spans:
            state = self._prompts[int(step.request_slots[part.index])]
            following = int(step.num_computed_tokens[part.index]) + part.first + 1
            rows.append(firsts[part.index] + part.first + np.arange(part.count))
            targets += state.token_ids[following : following + part.count]
            counts += [state.num_prompt_logprobs] * part.count
        joined = np.concatenate(rows)
        assert (joined[1:] > joined[:-1]).all(), "parts come in the order of their sequences"
        return joined, torch.tensor(targets), counts


def _part_of(rows: StepRows, low: int, high: int) -> StepRows:
    """Rows low .. high - 1 of a step, no tree cut; those before have their KV in the cache."""
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
        bases=rows.bases[chosen],
        is_tree=rows.is_tree[chosen],
        ancestors=rows.ancestors[low:high],
        tables=rows.tables,
    )
