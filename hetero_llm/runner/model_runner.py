"""Runs one step of a model with plain torch, on any device.

`launch` applies the step's changes and issues the device work; `finish` waits for it and brings
the small results to the host. Between the two the host is free. The draws of a step with draft
trees come in `finish`, one depth after the other.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch

from hetero_llm.core.acceptance import TypicalAcceptance
from hetero_llm.core.step import (
    LAST_DRAWN,
    ModelRunnerOutput,
    PromptRows,
    SchedulerOutput,
    SlotState,
)
from hetero_llm.models.config import ModelConfig
from hetero_llm.models.layers import CausalLM
from hetero_llm.runner.attention import RowKernel, TorchPagedAttention
from hetero_llm.runner.draft_trees import TreeRows, row_places, tree_rows
from hetero_llm.runner.kv_cache import PagedKVCache
from hetero_llm.runner.verify import DraftedStep, verify
from hetero_llm.sampling.sampler import LogprobTensors, Sampler, SampleResult, token_logprobs

_PROMPT_LOGPROB_ROWS = 256
"""Rows of full-vocabulary logits held at once for prompt_logprobs."""


@dataclass(slots=True)
class PendingStep:
    """A launched step, its results still on the device."""

    step: SchedulerOutput
    drawn: SampleResult | None
    prompt_logprobs: list[tuple[int, LogprobTensors]]


class TorchModelRunner:
    """Owns the KV cache, the block tables and the sampling state of every slot.

    Args:
        model: a module of `hetero_llm.models`, on `device`.
        config: its configuration.
        cache: the paged KV cache on the same device.
        max_num_seqs: slots.
        max_model_len: longest sequence, in tokens.
        batch_invariant: attention row by row (the model's products must be invariant, too).
        row_kernel: a faster attention for decoding rows.

    Attributes:
        typical: see `runner.verify`; to be set before the first step.
    """

    def __init__(
        self,
        model: CausalLM,
        config: ModelConfig,
        cache: PagedKVCache,
        *,
        max_num_seqs: int,
        max_model_len: int,
        device: torch.device,
        batch_invariant: bool = False,
        row_kernel: RowKernel | None = None,
    ) -> None:
        self.typical: TypicalAcceptance | None = None
        self._model = model
        self._cache = cache
        self._device = device
        self._attention = TorchPagedAttention(
            config, cache, row_by_row=batch_invariant, row_kernel=row_kernel
        )
        columns = -(-max_model_len // cache.shape.block_size)
        self._tables = np.zeros((max_num_seqs, columns), np.int32)
        self._sampler = Sampler(max_num_seqs, config.vocab_size, device)
        self._last_tokens = torch.zeros(max_num_seqs, dtype=torch.int64, device=device)
        self._prompts: dict[int, SlotState] = {}  # of slots that want prompt_logprobs

    @torch.inference_mode()
    def launch(self, step: SchedulerOutput) -> PendingStep | DraftedStep:
        """Issues all device work of a step, but for the draws of one with drafts."""
        self._apply_changes(step)
        trees = None if step.drafts is None else tree_rows(step, step.drafts)
        sequence_of = np.repeat(np.arange(len(step.slots)), step.counts)
        places = row_places(step) if trees is None else trees.places
        if self._sampler.has_history:
            observe_inputs(self._sampler, step)
        size = self._cache.shape.block_size
        tables = self._tables[step.slots]
        blocks = tables[sequence_of, places // size]
        attend = self._attention.plan(step.starts, step.counts, tables, places, blocks, trees)
        hidden = self._model(
            self._input_tokens(step, sequence_of)
            if trees is None
            else self._to_device(trees.token_ids.astype(np.int64)),
            self._to_device((places if trees is None else trees.positions).astype(np.int64)),
            attend,
        )
        if trees is None:
            return draw_step(
                self._model, hidden, step, self._sampler, self._last_tokens, self._prompts
            )
        return drafted_step(
            self._model,
            hidden,
            step,
            trees=trees,
            cache_rows=blocks * size + places % size,
            prompts=self._prompts,
        )

    @torch.inference_mode()
    def finish(self, pending: PendingStep | DraftedStep) -> ModelRunnerOutput:
        """Waits for a launched step and returns its results as plain data."""
        if isinstance(pending, DraftedStep):
            return verify(pending, self._sampler, self._cache, self._last_tokens, self.typical)
        token_ids = [] if pending.drawn is None else pending.drawn.token_ids.tolist()
        return plain_output(token_ids, pending)

    def _apply_changes(self, step: SchedulerOutput) -> None:
        for state in step.admitted:
            self._sampler.admit(state)
            if state.params.prompt_logprobs is not None:
                self._prompts[state.slot] = state
        writes = step.table_writes
        if writes.shape[1]:
            self._tables[writes[0], writes[1]] = writes[2]
        copies = step.block_copies
        if copies.shape[1]:
            self._cache.copy_blocks(list(zip(*copies.tolist(), strict=True)))

    def _input_tokens(self, step: SchedulerOutput, sequence_of: np.ndarray) -> torch.Tensor:
        """The rows' tokens [T] int64, those last drawn taken from the device."""
        token_ids = self._to_device(step.token_ids.astype(np.int64))
        if (step.token_ids == LAST_DRAWN).any():
            owners = self._to_device(step.slots[sequence_of].astype(np.int64))
            token_ids = torch.where(token_ids == LAST_DRAWN, self._last_tokens[owners], token_ids)
        return token_ids

    def _to_device(self, values: np.ndarray) -> torch.Tensor:
        return torch.from_numpy(values).to(self._device)


def draw_step(
    model: CausalLM,
    hidden: torch.Tensor,
    step: SchedulerOutput,
    sampler: Sampler,
    last_tokens: torch.Tensor,
    prompts: dict[int, SlotState],
) -> PendingStep:
    """Draws after the rows that want it, and computes the wanted log-probabilities.

    Args:
        hidden: [T, hidden] after the final norm.
        last_tokens: [slots] int64, written.
        prompts: the state of every slot that wants prompt_logprobs.
    """
    slots = step.slots
    prompt_logprobs = _all_prompt_logprobs(model, hidden, step, prompts)
    sampled = np.flatnonzero(step.num_samples)
    if len(sampled) == 0:
        return PendingStep(step, None, prompt_logprobs)
    samples = step.num_samples[sampled]
    last = (np.cumsum(step.counts) - 1)[sampled]
    drawn = sampler.sample(
        model.logits(hidden[torch.from_numpy(last).to(hidden.device)]),
        slots[sampled],
        (step.starts + step.counts)[sampled],
        samples,
    )
    # Of several draws of a slot any may stay: the sequence forks before it goes on.
    owners = np.repeat(slots[sampled], samples).astype(np.int64)
    last_tokens[torch.from_numpy(owners).to(hidden.device)] = drawn.token_ids
    return PendingStep(step, drawn, prompt_logprobs)


def drafted_step(
    model: CausalLM,
    hidden: torch.Tensor,
    step: SchedulerOutput,
    *,
    trees: TreeRows,
    cache_rows: np.ndarray,
    prompts: dict[int, SlotState],
) -> DraftedStep:
    """Prepares the draws of a step with drafts, whose model has been launched.

    Args:
        hidden: [T, hidden] after the final norm; looked at when the draws come.
        cache_rows: see `DraftedStep`. prompts: the state of every slot that wants prompt_logprobs.
    """

    def logits_after(rows: np.ndarray) -> torch.Tensor:
        return model.logits(hidden[torch.from_numpy(rows).to(hidden.device)])

    prompt_logprobs = _all_prompt_logprobs(model, hidden, step, prompts)
    return DraftedStep(step, trees, cache_rows, logits_after, prompt_logprobs)


def _all_prompt_logprobs(
    model: CausalLM, hidden: torch.Tensor, step: SchedulerOutput, prompts: dict[int, SlotState]
) -> list[tuple[int, LogprobTensors]]:
    """By slot, of all prompt rows of a step that are wanted."""
    slots = [int(step.slots[rows.index]) for rows in step.prompt_rows]
    return [
        (slot, prompt_row_logprobs(model, hidden, step, rows, prompts[slot]))
        for slot, rows in zip(slots, step.prompt_rows, strict=True)
    ]


def plain_output(token_ids: list[int], pending: PendingStep) -> ModelRunnerOutput:
    """A finished step's results; the drawn tokens are on the host already."""
    prompt_logprobs = {slot: rows.to_host() for slot, rows in pending.prompt_logprobs}
    drawn = pending.drawn
    if drawn is None:
        return ModelRunnerOutput(token_ids, None, prompt_logprobs, {})
    logprobs = None if drawn.logprobs is None else drawn.logprob_entries()
    return ModelRunnerOutput(token_ids, logprobs, prompt_logprobs, drawn.errors)


def observe_inputs(sampler: Sampler, step: SchedulerOutput) -> None:
    """Tells the sampler the input tokens of decoding sequences, for processors that look back.
    Draft nodes are told as they are accepted."""
    counts = step.counts if step.drafts is None else step.counts - step.drafts.counts
    single = np.flatnonzero(counts == 1)
    firsts = np.cumsum(counts) - counts
    for slot, position, token_id in zip(
        step.slots[single].tolist(),
        step.starts[single].tolist(),
        step.token_ids[firsts[single]].tolist(),
        strict=True,
    ):
        sampler.observe(slot, position, token_id)


def prompt_row_logprobs(
    model: CausalLM, hidden: torch.Tensor, step: SchedulerOutput, rows: PromptRows, state: SlotState
) -> LogprobTensors:
    """Log-probability of the prompt token that follows each of the wanted rows.

    Args:
        hidden: [T, hidden] of the step. state: of the rows' slot.
    """
    following = int(step.starts[rows.index]) + rows.first + 1
    targets = torch.tensor(
        state.token_ids[following : following + rows.count], device=hidden.device
    )
    begin = int(step.counts[: rows.index].sum()) + rows.first
    wanted = state.num_prompt_logprobs
    parts = []
    for low in range(0, rows.count, _PROMPT_LOGPROB_ROWS):
        high = min(low + _PROMPT_LOGPROB_ROWS, rows.count)
        logits = model.logits(hidden[begin + low : begin + high]).float()
        parts.append(token_logprobs(logits, targets[low:high], [wanted] * (high - low)))
    return _joined(parts)


def _joined(parts: list[LogprobTensors]) -> LogprobTensors:
    return LogprobTensors(
        torch.cat([p.drawn for p in parts]),
        torch.cat([p.rank for p in parts]),
        torch.cat([p.top_ids for p in parts]),
        torch.cat([p.top_values for p in parts]),
        [count for p in parts for count in p.counts],
    )
