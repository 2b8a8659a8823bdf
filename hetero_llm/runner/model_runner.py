"""Runs one step of a model with plain torch, on any device.

`launch` applies the step's changes and issues the device work; `finish` waits for it and brings
the small results to the host. Between the two the host is free. The draws of a step with draft
trees come in `finish`, one depth after the other.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

import numpy as np
import torch

from hetero_llm.core.acceptance import TypicalAcceptance
from hetero_llm.core.step import (
    LAST_SAMPLED,
    AdmittedSequence,
    ModelRunnerOutput,
    PromptLogprobSpan,
    SchedulerOutput,
)
from hetero_llm.models.config import ModelConfig
from hetero_llm.models.layers import Attend, CausalLM
from hetero_llm.models.multimodal import ImageCausalLM
from hetero_llm.runner.attention import RowKernel, TorchPagedAttention
from hetero_llm.runner.image_rows import SlotImages
from hetero_llm.runner.kv_cache import PagedKVCache
from hetero_llm.runner.layer_ready import GatedAttention, Gates
from hetero_llm.runner.verify import DraftedStep, verify
from hetero_llm.sampling.sampler import LogprobTensors, Sampler, SampleResult, token_logprobs
from hetero_llm.spec_decode.verify import TreeTokens, tree_tokens

_PROMPT_LOGPROB_ROWS = 256
"""Rows of full-vocabulary logits held at once for prompt_logprobs."""


@runtime_checkable
class TimedGates(Gates, Protocol):
    """Gates that give up after a while. `turn` names the step armed last."""

    turn: int

    def take_error(self, turn: int) -> bool:
        """Whether a gate of that step gave up; to be asked once, when the step is over."""
        ...


@dataclass(slots=True)
class PendingStep:
    """A launched step, its results still on the device. `turn` is its gates', if they may give up;
    `over` then happens when it is over (None: it is already)."""

    step: SchedulerOutput
    drawn: SampleResult | None
    prompt_logprobs: list[tuple[int, LogprobTensors]]
    turn: int | None = None
    over: torch.cuda.Event | None = None


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
        gates: what steps with `loads` wait at; to be set before the first one.
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
        self.gates: Gates | None = None
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
        self._prompts: dict[int, AdmittedSequence] = {}  # of slots that want prompt_logprobs
        self._images = SlotImages(model, device) if isinstance(model, ImageCausalLM) else None

    @torch.inference_mode()
    def launch(self, step: SchedulerOutput) -> PendingStep | DraftedStep:
        """Issues all device work of a step, but for the draws of one with drafts."""
        if step.kv_loads:
            arm_gates(self.gates, step)
        self._apply_changes(step)
        trees = tree_tokens(step, step.drafts)
        sequence_of = np.repeat(np.arange(len(step.request_slots)), step.num_scheduled_tokens)
        if self._sampler.has_history:
            observe_inputs(self._sampler, step)
        size = self._cache.shape.block_size
        tables = self._tables[step.request_slots]
        indices = trees.kv_indices
        blocks = tables[sequence_of, indices // size]
        attend: Attend = self._attention.plan(
            step.num_computed_tokens, step.num_scheduled_tokens, tables, indices, blocks, trees
        )
        if step.kv_loads:
            assert self.gates is not None
            attend = GatedAttention(attend, self.gates)
        token_ids = self._input_tokens(trees.token_ids, step.request_slots[sequence_of])
        hidden = self._forward(step, token_ids, trees.positions, attend)
        if step.drafts is None:
            pending = draw_step(
                self._model, hidden, step, self._sampler, self._last_tokens, self._prompts
            )
            if step.kv_loads and isinstance(self.gates, TimedGates):
                pending.turn = self.gates.turn
                if self._device.type == "cuda":
                    pending.over = torch.cuda.Event()
                    pending.over.record()
            return pending
        return drafted_step(
            self._model,
            hidden,
            step,
            trees=trees,
            slot_mapping=blocks * size + indices % size,
            prompts=self._prompts,
        )

    @torch.inference_mode()
    def finish(self, pending: PendingStep | DraftedStep) -> ModelRunnerOutput:
        """Waits for a launched step and returns its results as plain data."""
        if isinstance(pending, DraftedStep):
            return verify(pending, self._sampler, self._cache, self._last_tokens, self.typical)
        token_ids = [] if pending.drawn is None else pending.drawn.token_ids.tolist()
        output = plain_output(token_ids, pending)
        if pending.turn is None:
            return output
        if pending.over is not None:
            pending.over.synchronize()
        assert isinstance(self.gates, TimedGates)
        return dataclasses.replace(output, kv_loads_timed_out=self.gates.take_error(pending.turn))

    def _forward(
        self, step: SchedulerOutput, token_ids: torch.Tensor, places: np.ndarray, attend: Attend
    ) -> torch.Tensor:
        """[T, hidden] of the rows with these tokens at these positions of their sequences."""
        positions = self._to_device(places.astype(np.int64))
        images = None if self._images is None else self._images.rows(step, places)
        if images is None:
            return self._model(token_ids, positions, attend)
        return self._model(token_ids, positions, attend, images)

    def _apply_changes(self, step: SchedulerOutput) -> None:
        for state in step.admitted:
            self._sampler.admit(state)
            if self._images is not None:
                self._images.admit(state)
            if state.params.prompt_logprobs is not None:
                self._prompts[state.request_slot] = state
        writes = step.block_table_writes
        if writes.shape[1]:
            self._tables[writes[0], writes[1]] = writes[2]
        copies = step.block_copies
        if copies.shape[1]:
            if step.kv_loads and self.gates is not None:
                self.gates.wait(self._cache.shape.num_layers - 1)  # one of them may be loading
            self._cache.copy_blocks(list(zip(*copies.tolist(), strict=True)))

    def _input_tokens(self, token_ids: np.ndarray, request_slots: np.ndarray) -> torch.Tensor:
        """A step's tokens [T] int64, those of `LAST_SAMPLED` taken from the device.

        Args:
            request_slots: [T] that of each token.
        """
        known = self._to_device(token_ids.astype(np.int64))
        if not (token_ids == LAST_SAMPLED).any():
            return known
        owners = self._to_device(request_slots.astype(np.int64))
        return torch.where(known == LAST_SAMPLED, self._last_tokens[owners], known)

    def _to_device(self, values: np.ndarray) -> torch.Tensor:
        return torch.from_numpy(values).to(self._device)


def arm_gates(gates: Gates | None, step: SchedulerOutput) -> None:
    """Before anything of a step with `loads` is launched."""
    assert gates is not None, "a step waits for loads, but nothing loads"
    assert step.drafts is None, "a step with loads has drafts"
    gates.arm(step.kv_loads)


def draw_step(
    model: CausalLM,
    hidden: torch.Tensor,
    step: SchedulerOutput,
    sampler: Sampler,
    last_tokens: torch.Tensor,
    prompts: dict[int, AdmittedSequence],
) -> PendingStep:
    """Draws after the rows that want it, and computes the wanted log-probabilities.

    Args:
        hidden: [T, hidden] after the final norm.
        last_tokens: [slots] int64, written.
        prompts: the state of every slot that wants prompt_logprobs.
    """
    slots = step.request_slots
    prompt_logprobs = _all_prompt_logprobs(model, hidden, step, prompts)
    sampled = np.flatnonzero(step.num_samples)
    if len(sampled) == 0:
        return PendingStep(step, None, prompt_logprobs)
    samples = step.num_samples[sampled]
    last = (np.cumsum(step.num_scheduled_tokens) - 1)[sampled]
    drawn = sampler.sample(
        model.logits(hidden[torch.from_numpy(last).to(hidden.device)]),
        slots[sampled],
        (step.num_computed_tokens + step.num_scheduled_tokens)[sampled],
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
    trees: TreeTokens,
    slot_mapping: np.ndarray,
    prompts: dict[int, AdmittedSequence],
) -> DraftedStep:
    """Prepares the draws of a step with drafts, whose model has been launched.

    Args:
        hidden: [T, hidden] after the final norm; looked at when the draws come.
        slot_mapping: see `DraftedStep`.
        prompts: the state of every slot that wants prompt_logprobs.
    """

    def logits_after(rows: np.ndarray) -> torch.Tensor:
        return model.logits(hidden[torch.from_numpy(rows).to(hidden.device)])

    prompt_logprobs = _all_prompt_logprobs(model, hidden, step, prompts)
    return DraftedStep(step, trees, slot_mapping, logits_after, prompt_logprobs)


def _all_prompt_logprobs(
    model: CausalLM,
    hidden: torch.Tensor,
    step: SchedulerOutput,
    prompts: dict[int, AdmittedSequence],
) -> list[tuple[int, LogprobTensors]]:
    """By slot, of all prompt rows of a step that are wanted."""
    slots = [int(step.request_slots[rows.index]) for rows in step.prompt_logprob_spans]
    return [
        (slot, prompt_row_logprobs(model, hidden, step, rows, prompts[slot]))
        for slot, rows in zip(slots, step.prompt_logprob_spans, strict=True)
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
    counts = (
        step.num_scheduled_tokens
        if step.drafts is None
        else step.num_scheduled_tokens - step.drafts.counts
    )
    single = np.flatnonzero(counts == 1)
    firsts = np.cumsum(counts) - counts
    for slot, position, token_id in zip(
        step.request_slots[single].tolist(),
        step.num_computed_tokens[single].tolist(),
        step.token_ids[firsts[single]].tolist(),
        strict=True,
    ):
        sampler.observe(slot, position, token_id)


def prompt_row_logprobs(
    model: CausalLM,
    hidden: torch.Tensor,
    step: SchedulerOutput,
    rows: PromptLogprobSpan,
    state: AdmittedSequence,
) -> LogprobTensors:
    """Log-probability of the prompt token that follows each of the wanted rows.

    Args:
        hidden: [T, hidden] of the step. state: of the rows' slot.
    """
    following = int(step.num_computed_tokens[rows.index]) + rows.first + 1
    targets = torch.tensor(
        list(state.token_ids[following : following + rows.count]), device=hidden.device
    )
    begin = int(step.num_scheduled_tokens[: rows.index].sum()) + rows.first
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
