"""Runs one step of a model with plain torch, on any device.

`launch` applies the step's changes and issues the device work; `finish` waits for it and brings
the small results to the host. Between the two the host is free. A step with draft trees is sampled
in `finish`, one depth after the other (`runner.verify`).

The functions below the class are those that the native and the GPU runner share with it.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

import numpy as np
import torch

from hetero_llm.core.acceptance import TypicalAcceptance
from hetero_llm.core.grammar import OpenMatcher
from hetero_llm.core.step import (
    LAST_SAMPLED,
    AdmittedSequence,
    ModelRunnerOutput,
    PromptLogprobSpan,
    SchedulerOutput,
)
from hetero_llm.models.collectives import NO_LINK
from hetero_llm.models.config import ModelConfig
from hetero_llm.models.layers import Attend, CausalLM
from hetero_llm.models.multimodal import ImageCausalLM
from hetero_llm.runner.adapters import NoStepAdapters, StepAdapters
from hetero_llm.runner.attention import RowKernel, TorchPagedAttention
from hetero_llm.runner.image_rows import SlotImages
from hetero_llm.runner.kv_cache import PagedKVCache
from hetero_llm.runner.layer_ready import LayerReadyAttention, LayerReadyFlags
from hetero_llm.runner.sequence_parallel import (
    NO_SEQUENCE_PARALLEL,
    NoSequenceParallel,
    SequenceParallel,
)
from hetero_llm.runner.verify import DraftedStep, verify
from hetero_llm.runner.virtual_tokens import VirtualTokens
from hetero_llm.sampling.sampler import LogprobTensors, Sampler, SampleResult, token_logprobs
from hetero_llm.spec_decode.verify import TreeTokens, tree_tokens

PROMPT_LOGPROB_TOKENS = 256
"""Prompt tokens whose full-vocabulary logits are held at once for prompt_logprobs."""


@runtime_checkable
class TimedLayerReadyFlags(LayerReadyFlags, Protocol):
    """Layer-ready flags whose waits time out.

    Attributes:
        turn: names the step armed last.
    """

    turn: int

    def take_error(self, turn: int) -> bool:
        """Whether a wait of that step timed out. Call it once, after the step has finished."""
        ...


@dataclass(slots=True)
class PendingStep:
    """A launched step, its results still on the device.

    Attributes:
        sampled: None if the step samples nothing.
        prompt_logprobs: request slot and log-probabilities of its wanted prompt tokens.
        turn: of the step's layer-ready flags if their waits may time out, else None.
        over: with `turn`, happens when the step has finished; None: it has.
    """

    step: SchedulerOutput
    sampled: SampleResult | None
    prompt_logprobs: list[tuple[int, LogprobTensors]]
    turn: int | None = None
    over: torch.cuda.Event | None = None


class TorchModelRunner:
    """Owns the KV cache, the block tables and the sampling state of every request slot.

    Args:
        model: a module of `hetero_llm.models`, on `device`.
        config: its configuration.
        cache: the paged KV cache on the same device.
        max_num_seqs: request slots.
        max_model_len: longest sequence, in tokens.
        batch_invariant: attention token by token (the model's products must be invariant, too).
        row_kernel: a faster attention for decoding.
        prompt_adapters: prompts may begin with virtual tokens.

    Attributes:
        model, cache: see Args.
        typical: see `runner.verify`; to be set before the first step.
        layer_ready: the flags at which steps with `kv_loads` wait; to be set before the first one.
        adapters: of the steps' requests; to be set before the first step.
        sequence: which steps other ranks share; to be set before the first step.
        link: to the neighbouring stages, where the model is one of several; to be set before the
            first step. Stages before the last one sample nothing.
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
        prompt_adapters: bool = False,
    ) -> None:
        self.typical: TypicalAcceptance | None = None
        self.layer_ready: LayerReadyFlags | None = None
        self.adapters: StepAdapters | NoStepAdapters = NoStepAdapters()
        self.sequence: SequenceParallel | NoSequenceParallel = NO_SEQUENCE_PARALLEL
        self.link = NO_LINK
        self.model = model
        self.cache = cache
        self._device = device
        self._attention = TorchPagedAttention(
            config, cache, row_by_row=batch_invariant, row_kernel=row_kernel
        )
        columns = -(-max_model_len // cache.shape.block_size)
        self._block_tables = np.zeros((max_num_seqs, columns), np.int32)
        self._sampler = Sampler(max_num_seqs, config.vocab_size, device)
        self._last_tokens = torch.zeros(max_num_seqs, dtype=torch.int64, device=device)
        self._prompts: dict[int, AdmittedSequence] = {}  # by slots that want prompt_logprobs
        self._images: SlotImages | None = None
        self._virtual: VirtualTokens | None = None
        if isinstance(model, ImageCausalLM):
            self._images = SlotImages(model, device, mrope=model.config.mrope)
        elif prompt_adapters:
            self._virtual = VirtualTokens(model, device)
            self._images = SlotImages(self._virtual, device, mrope=False)

    def set_open_matcher(self, open_matcher: OpenMatcher) -> None:
        """Sets what opens the grammars of admitted sequences; call it before one has any."""
        self._sampler.masks.open_matcher = open_matcher

    @torch.inference_mode()
    def launch(self, step: SchedulerOutput) -> PendingStep | DraftedStep:
        """Issues all device work of a step, except for the sampling of one with drafts."""
        if step.kv_loads:
            arm_layer_ready(self.layer_ready, step)
        self._apply_changes(step)
        part = self.sequence.part(step, self._device)
        own = part.own
        self.adapters.begin(own)
        if self._sampler.has_history:
            observe_inputs(self._sampler, step)
        trees = tree_tokens(step, step.drafts)
        own_trees = trees if own is step else tree_tokens(own, own.drafts)
        size = self.cache.shape.block_size
        slots = np.repeat(step.request_slots, step.num_scheduled_tokens)
        indices = trees.kv_indices
        blocks = self._block_tables[slots, indices // size]
        attend: Attend = self._attention.plan(
            own.num_computed_tokens, own.num_scheduled_tokens,
            self._block_tables[own.request_slots], indices, blocks, own_trees, part.gather_kv,
        )  # fmt: skip
        if step.kv_loads:
            assert self.layer_ready is not None
            attend = LayerReadyAttention(attend, self.layer_ready)
        token_ids = self._input_tokens(
            own_trees.token_ids, np.repeat(own.request_slots, own.num_scheduled_tokens)
        )
        hidden = part.gather_hidden(self._forward(own, token_ids, own_trees.positions, attend))
        if not self.model.config.rank.is_last:
            self.link.send(hidden)
            return self._note_loads(PendingStep(step, None, []))
        if step.drafts is not None:
            return drafted_step(
                self.model,
                hidden,
                step,
                trees=trees,
                slot_mapping=blocks * size + indices % size,
                prompts=self._prompts,
            )
        pending = sample_step(
            self.model, hidden, step, self._sampler, self._last_tokens, self._prompts
        )
        return self._note_loads(pending)

    def _note_loads(self, pending: PendingStep) -> PendingStep:
        """The step with what `finish` needs to see whether its waits for loads timed out."""
        if pending.step.kv_loads and isinstance(self.layer_ready, TimedLayerReadyFlags):
            pending.turn = self.layer_ready.turn
            if self._device.type == "cuda":
                pending.over = torch.cuda.Event()
                pending.over.record()
        return pending

    @torch.inference_mode()
    def finish(self, pending: PendingStep | DraftedStep) -> ModelRunnerOutput:
        """Waits for a launched step and returns its results as plain data."""
        if isinstance(pending, DraftedStep):
            return verify(pending, self._sampler, self.cache, self._last_tokens, self.typical)
        token_ids = [] if pending.sampled is None else pending.sampled.token_ids.tolist()
        output = plain_output(token_ids, pending)
        if pending.turn is None:
            return output
        if pending.over is not None:
            pending.over.synchronize()
        assert isinstance(self.layer_ready, TimedLayerReadyFlags)
        timed_out = self.layer_ready.take_error(pending.turn)
        return dataclasses.replace(output, kv_loads_timed_out=timed_out)

    def _forward(
        self, step: SchedulerOutput, token_ids: torch.Tensor, positions: np.ndarray, attend: Attend
    ) -> torch.Tensor:
        """[T, hidden] of these tokens at these positions of their sequences."""
        on_device = self._to_device(positions.astype(np.int64))
        rank = self.model.config.rank
        if not rank.is_first:
            size, dtype = self.model.config.hidden_size, next(self.model.parameters()).dtype
            given = torch.empty(len(token_ids), size, dtype=dtype, device=self._device)
            self.link.receive(given)
            return self.model(given, on_device, attend)
        images = None if self._images is None else self._images.rows(step, positions)
        if images is None:
            return self.model(token_ids, on_device, attend)
        if self._virtual is not None:
            with self._virtual.given(images.embeddings):
                return self.model(token_ids, on_device, attend)
        return self.model(token_ids, on_device, attend, images)

    def _apply_changes(self, step: SchedulerOutput) -> None:
        samples = self.model.config.rank.is_last
        for state in step.admitted if samples else ():
            self._sampler.admit(state)
            if self._images is not None:
                self._images.admit(state)
            if state.params.prompt_logprobs is not None:
                self._prompts[state.request_slot] = state
        if step.block_copies.shape[1] and step.kv_loads and self.layer_ready is not None:
            self.layer_ready.wait(self.cache.shape.num_layers - 1)  # a source may be loading
        apply_block_changes(step, self._block_tables, self.cache)

    def _input_tokens(self, token_ids: np.ndarray, request_slots: np.ndarray) -> torch.Tensor:
        """A step's tokens [T] int64, those of `LAST_SAMPLED` taken from the device.

        Args:
            request_slots: [T] request slot of each token.
        """
        known = self._to_device(token_ids.astype(np.int64))
        if not (token_ids == LAST_SAMPLED).any():
            return known
        owners = self._to_device(request_slots.astype(np.int64))
        return torch.where(known == LAST_SAMPLED, self._last_tokens[owners], known)

    def _to_device(self, values: np.ndarray) -> torch.Tensor:
        return torch.from_numpy(values).to(self._device)


def arm_layer_ready(layer_ready: LayerReadyFlags | None, step: SchedulerOutput) -> None:
    """Arms the flags for a step with `kv_loads`, before anything of it is launched."""
    assert layer_ready is not None, "a step waits for loads, but nothing loads"
    assert step.drafts is None, "a step with loads has drafts"
    layer_ready.arm(step.kv_loads)


def apply_block_changes(
    step: SchedulerOutput, block_tables: np.ndarray, cache: PagedKVCache
) -> None:
    """Writes a step's block-table entries, then copies its blocks.

    Args:
        block_tables: [request slots, columns] int32 on the host.
    """
    writes = step.block_table_writes
    if writes.shape[1]:
        block_tables[writes[0], writes[1]] = writes[2]
    copies = step.block_copies
    if copies.shape[1]:
        cache.copy_blocks(list(zip(*copies.tolist(), strict=True)))


def sample_step(
    model: CausalLM,
    hidden: torch.Tensor,
    step: SchedulerOutput,
    sampler: Sampler,
    last_tokens: torch.Tensor,
    prompts: dict[int, AdmittedSequence],
    *,
    sampled_rows: bool = False,
    masked_later: bool = False,
) -> PendingStep:
    """Samples where a step without drafts wants it, and computes the wanted log-probabilities.

    Args:
        hidden: [T, hidden] after the final norm.
        sampled_rows: `hidden` has one row for each sample instead, and the step wants no
            log-probabilities of a prompt.
        masked_later: see `Sampler.sample`.
        last_tokens: [request slots] int64, written.
        prompts: the state of every slot that wants prompt_logprobs.
    """
    prompt_logprobs = _all_prompt_logprobs(model, hidden, step, prompts)
    sequences = np.flatnonzero(step.num_samples)
    if len(sequences) == 0:
        return PendingStep(step, None, prompt_logprobs)
    slots, samples = step.request_slots[sequences], step.num_samples[sequences]
    last = (np.cumsum(step.num_samples if sampled_rows else step.num_scheduled_tokens) - 1)[
        sequences
    ]
    sampled = sampler.sample(
        model.logits(hidden[torch.from_numpy(last).to(hidden.device)]),
        slots,
        (step.num_computed_tokens + step.num_scheduled_tokens)[sequences],
        samples,
        masked_later=masked_later,
    )
    # Of several samples of a slot any may stay: the sequence forks before its next step.
    owners = np.repeat(slots, samples).astype(np.int64)
    last_tokens[torch.from_numpy(owners).to(hidden.device)] = sampled.token_ids
    return PendingStep(step, sampled, prompt_logprobs)


def drafted_step(
    model: CausalLM,
    hidden: torch.Tensor,
    step: SchedulerOutput,
    *,
    trees: TreeTokens,
    slot_mapping: np.ndarray,
    prompts: dict[int, AdmittedSequence],
) -> DraftedStep:
    """Prepares the sampling of a step with drafts, whose model has been launched.

    Args:
        hidden: [T, hidden] after the final norm; read by the sampling.
        slot_mapping: see `DraftedStep`.
        prompts: the state of every slot that wants prompt_logprobs.
    """

    def logits_after(indices: np.ndarray) -> torch.Tensor:
        return model.logits(hidden[torch.from_numpy(indices).to(hidden.device)])

    prompt_logprobs = _all_prompt_logprobs(model, hidden, step, prompts)
    return DraftedStep(step, trees, slot_mapping, logits_after, prompt_logprobs)


def plain_output(token_ids: list[int], pending: PendingStep) -> ModelRunnerOutput:
    """The results of a finished step without drafts.

    Args:
        token_ids: the sampled tokens, which are on the host already.
    """
    prompt_logprobs = {slot: tensors.to_host() for slot, tensors in pending.prompt_logprobs}
    sampled = pending.sampled
    if sampled is None:
        return ModelRunnerOutput(token_ids, None, prompt_logprobs, {})
    logprobs = None if sampled.logprobs is None else sampled.logprob_entries()
    return ModelRunnerOutput(token_ids, logprobs, prompt_logprobs, sampled.errors)


def observe_inputs(sampler: Sampler, step: SchedulerOutput) -> None:
    """Shows the sampler the input tokens of decoding sequences, for grammars and for processors
    that look back. Draft nodes follow when they are accepted (`runner.verify`), tokens that only
    the device knows when their step is finished."""
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
        if token_id != LAST_SAMPLED:
            sampler.observe(slot, position, token_id)


def prompt_targets(
    step: SchedulerOutput, span: PromptLogprobSpan, state: AdmittedSequence
) -> tuple[int, list[int]]:
    """Index in the step of a span's first token, and the token that follows each of the span's.

    Args:
        state: of the span's sequence.
    """
    first = int(step.num_scheduled_tokens[: span.index].sum()) + span.first
    following = int(step.num_computed_tokens[span.index]) + span.first + 1
    return first, list(state.token_ids[following : following + span.count])


def _all_prompt_logprobs(
    model: CausalLM,
    hidden: torch.Tensor,
    step: SchedulerOutput,
    prompts: dict[int, AdmittedSequence],
) -> list[tuple[int, LogprobTensors]]:
    """By request slot, for all spans of a step."""
    slots = [int(step.request_slots[span.index]) for span in step.prompt_logprob_spans]
    return [
        (slot, _span_logprobs(model, hidden, step, span, prompts[slot]))
        for slot, span in zip(slots, step.prompt_logprob_spans, strict=True)
    ]


def _span_logprobs(
    model: CausalLM,
    hidden: torch.Tensor,
    step: SchedulerOutput,
    span: PromptLogprobSpan,
    state: AdmittedSequence,
) -> LogprobTensors:
    """Log-probability of the prompt token that follows each token of a span.

    Args:
        hidden: [T, hidden] of the step.
        state: of the span's sequence.
    """
    first, following = prompt_targets(step, span, state)
    targets = torch.tensor(following, device=hidden.device)
    parts = []
    for low in range(0, span.count, PROMPT_LOGPROB_TOKENS):
        high = min(low + PROMPT_LOGPROB_TOKENS, span.count)
        logits = model.logits(hidden[first + low : first + high]).float()
        counts = [state.num_prompt_logprobs] * (high - low)
        parts.append(token_logprobs(logits, targets[low:high], counts))
    return LogprobTensors(
        torch.cat([p.sampled for p in parts]),
        torch.cat([p.rank for p in parts]),
        torch.cat([p.top_ids for p in parts]),
        torch.cat([p.top_values for p in parts]),
        [count for p in parts for count in p.counts],
    )
