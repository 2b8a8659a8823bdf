"""Runs steps through the native executor, draft trees included.

Greedy and temperature-only sampling happens in the library, where the logits stay, with the token
masks of sequences that follow a grammar. A step in which any sequence wants more (thresholds,
penalties, users' processors, log-probabilities) brings the logits that are sampled from to the
torch sampler, which then takes part in the verification of draft trees (`runner.verify`).
Reference: `runner.model_runner.TorchModelRunner`.
"""

from __future__ import annotations

from dataclasses import replace
from itertools import accumulate

import numpy as np
import torch

from hetero_llm.core.acceptance import TypicalAcceptance
from hetero_llm.core.grammar import OpenMatcher
from hetero_llm.core.step import (
    LAST_SAMPLED,
    AdmittedSequence,
    ModelRunnerOutput,
    SampleLogprobs,
    SchedulerOutput,
)
from hetero_llm.cpu.adapters import HeldAdapters, NativeAdapters, NoNativeAdapters
from hetero_llm.cpu.executor import LOGITS_ONLY, Executor, SampleMasks, StepInput, StepSamples
from hetero_llm.cpu.step_buffers import SlotSampling, StepBuffers
from hetero_llm.cpu.step_profile import profile_executor
from hetero_llm.models.config import ModelConfig
from hetero_llm.runner.kv_cache import PagedKVCache
from hetero_llm.runner.model_runner import (
    PROMPT_LOGPROB_TOKENS,
    PendingStep,
    apply_block_changes,
    observe_inputs,
    plain_output,
    prompt_targets,
)
from hetero_llm.runner.verify import DraftedStep, verify
from hetero_llm.sampling.sampler import Sampler, expand_samples, token_logprobs
from hetero_llm.sampling.token_masks import PlannedMasks
from hetero_llm.spec_decode.verify import TreeTokens, compact_kv, tree_tokens, verify_trees


class NativeModelRunner:
    """Owns the KV cache, the block tables and the sampling state of every request slot.

    Args:
        executor: holds the model's weights and works on `cache`.
        config: the model's configuration.
        cache: the paged KV cache in host memory.
        max_num_seqs: request slots.
        max_model_len: longest sequence, in tokens.
        max_num_batched_tokens: most tokens of a step.
        drafts: steps may hold draft nodes, so the cost of steps is measured now.

    Attributes:
        profile: tokens and seconds of steps, ascending; empty without drafts.
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
        self._block_tables = np.zeros((max_num_seqs, columns), np.int32)
        self._sampler = Sampler(max_num_seqs, config.vocab_size, torch.device("cpu"))
        self._sampling = SlotSampling(max_num_seqs)
        self._masks = self._sampler.masks
        self._buffers = StepBuffers(
            max_num_batched_tokens, max_num_seqs, self._block_tables, self._masks.num_words
        )
        buffers = self._buffers
        self._prepared = executor.prepare(buffers.inputs, buffers.samples, buffers.tokens)
        self._prompts: dict[int, AdmittedSequence] = {}  # by slots that want prompt_logprobs
        self._adapters: NativeAdapters | NoNativeAdapters = NoNativeAdapters()

    def serve_adapters(self, memory: HeldAdapters, num_slots: int, dtype: torch.dtype) -> None:
        """Lets steps have adapters; call it before the first step. See `NativeAdapters`."""
        self._adapters = NativeAdapters(
            self._executor,
            memory,
            num_slots=num_slots,
            max_num_seqs=len(self._block_tables),
            dtype=dtype,
        )

    def set_open_matcher(self, open_matcher: OpenMatcher) -> None:
        """Sets what opens the grammars of admitted sequences; call it before one has any."""
        self._masks.open_matcher = open_matcher

    @torch.inference_mode()
    def launch(self, step: SchedulerOutput) -> ModelRunnerOutput:
        """Runs a step to its end: the CPU computes it."""
        assert LAST_SAMPLED not in step.token_ids, "no step overlaps another, so tokens are known"
        self._apply_changes(step)
        adapter_slots = self._adapters.begin(step)
        if self._sampler.has_history:
            observe_inputs(self._sampler, step)
        plain = not step.prompt_logprob_spans and not self._sampler.has_processors
        planned = self._masks.plan(step)
        if planned is not None and planned.num_places > self._buffers.num_masks:
            plain = False
        if plain and (step.drafts is None or self.typical is None):
            num_samples = self._buffers.fill(step, self._sampling, self._cache.shape.block_size)
            if num_samples is not None:
                return self._run_plain(step, num_samples, planned, adapter_slots)
        trees = tree_tokens(step, step.drafts)
        inputs = self._step_input(step, trees, adapter_slots)
        if step.drafts is not None:
            return self._run_drafted(step, inputs, trees, planned)
        sequences = np.flatnonzero(step.num_samples)
        last = (np.cumsum(step.num_scheduled_tokens) - 1)[sequences]
        if step.prompt_logprob_spans or self._needs_logits(step):
            logits, prompt_logprobs = self._logits(step, inputs, last)
            output = self._sample_logits(step, logits)
            return replace(output, prompt_logprobs=prompt_logprobs)
        counts = step.num_samples[sequences]
        token_ids, errors = self._run_sampling(
            step, inputs, sequences, last, counts, planned=planned
        )
        output = ModelRunnerOutput(token_ids, None, {}, errors)
        self._observe_sampled(step, planned, output)
        return output

    def finish(self, pending: ModelRunnerOutput) -> ModelRunnerOutput:
        """The results of a launched step."""
        return pending

    def _run_plain(
        self,
        step: SchedulerOutput,
        num_samples: int,
        planned: PlannedMasks | None,
        adapter_slots: np.ndarray | None,
    ) -> ModelRunnerOutput:
        """Runs the step that the buffers hold, and verifies its drafts."""
        drafts, buffers = step.drafts, self._buffers
        errors: dict[int, str] = {}
        buffers.set_masks(None if planned is None else planned.places)
        if planned is not None:
            errors = self._masks.fill(planned, buffers.mask_words)
        num_nodes = 0 if drafts is None else len(drafts.token_ids)
        num_tokens = len(step.token_ids) + num_nodes
        sizes = num_tokens, len(step.request_slots), num_samples
        self._executor.run(self._prepared, *sizes, adapter_slots=adapter_slots)
        if drafts is None:
            tokens = buffers.tokens[:num_samples].tolist()
            output = ModelRunnerOutput(tokens, None, {}, errors)
        else:
            kept, counts, moves = buffers.verify(step, drafts, num_samples)
            if moves.size:
                self._cache.move_tokens(*moves)
            output = ModelRunnerOutput(
                kept.tolist(), None, {}, errors, counts.tolist(), arrays=(kept, counts)
            )
        self._observe_sampled(step, planned, output)
        return output

    def _observe_sampled(
        self, step: SchedulerOutput, planned: PlannedMasks | None, output: ModelRunnerOutput
    ) -> None:
        """Shows the grammars what a step has sampled with masks."""
        if planned is not None:
            num_tokens = output.num_tokens or step.num_samples.tolist()
            self._masks.observe_sampled(planned, output.token_ids, num_tokens)

    def _apply_changes(self, step: SchedulerOutput) -> None:
        for state in step.admitted:
            self._sampler.admit(state)
            self._sampling.admit(state)
            if state.params.prompt_logprobs is not None:
                self._prompts[state.request_slot] = state
        apply_block_changes(step, self._block_tables, self._cache)

    # -- inputs and sampling ----------------------------------------------------------------

    def _step_input(
        self, step: SchedulerOutput, trees: TreeTokens, adapter_slots: np.ndarray | None
    ) -> StepInput:
        size = np.int32(self._cache.shape.block_size)
        owners = np.repeat(step.request_slots, step.num_scheduled_tokens)
        indices = trees.kv_indices
        return StepInput(
            token_ids=trees.token_ids,
            positions=trees.positions,
            slot_mapping=self._block_tables[owners, indices // size] * size + indices % size,
            request_slots=step.request_slots,
            num_computed_tokens=step.num_computed_tokens,
            num_scheduled_tokens=step.num_scheduled_tokens,
            bases=step.num_computed_tokens,
            is_tree=trees.is_tree,
            ancestors=trees.ancestors,
            block_tables=self._block_tables,
            adapter_slots=adapter_slots,
        )

    def _needs_logits(self, step: SchedulerOutput) -> bool:
        """Whether the library cannot sample for some sequence of the step."""
        modes = self._sampling.modes[step.request_slots[step.num_samples > 0]]
        return bool((modes == LOGITS_ONLY).any())

    def _run_sampling(
        self,
        step: SchedulerOutput,
        inputs: StepInput,
        sequences: np.ndarray,
        after: np.ndarray,
        counts: np.ndarray,
        *,
        planned: PlannedMasks | None,
    ) -> tuple[list[int], dict[int, str]]:
        """Runs a step in which the library samples.

        Args:
            sequences: [N] index of the scheduled sequence.
            after: [N] index in the step of the token to sample after.
            counts: [N] samples after it; of more than one the sample indices are 0, 1, ...
            planned: the step's masks; None: it has none.

        Returns:
            The sampled tokens, and by request slot why a grammar cannot be followed.
        """
        masks, errors = None, {}
        if planned is not None:
            words = np.empty((planned.num_places, self._masks.num_words), np.int32)
            errors = self._masks.fill(planned, words)
            masks = SampleMasks(planned.places, words)
        slots = step.request_slots[sequences]
        indices = self._sampling.sample_indices[slots]
        if (counts > 1).any():
            source, indices = expand_samples(counts, indices)
            slots, after = slots[source], after[source]
        samples = StepSamples(
            token_indices=after.astype(np.int32),
            modes=self._sampling.modes[slots],
            temperatures=self._sampling.temperatures[slots],
            seeds=self._sampling.seeds[slots],
            positions=inputs.positions[after] + np.int32(1),
            sample_indices=indices.astype(np.int32),
            masks=masks,
        )
        return self._executor.step(inputs, samples).tolist(), errors

    def _sample_logits(self, step: SchedulerOutput, logits: torch.Tensor) -> ModelRunnerOutput:
        """Samples from logits [N, vocab], one row for each sequence that samples."""
        sequences = np.flatnonzero(step.num_samples)
        if len(sequences) == 0:
            return ModelRunnerOutput([], None, {}, {})
        positions = (step.num_computed_tokens + step.num_scheduled_tokens)[sequences]
        result = self._sampler.sample(
            logits, step.request_slots[sequences], positions, step.num_samples[sequences]
        )
        return plain_output(result.token_ids.tolist(), PendingStep(step, result, []))

    # -- draft trees ------------------------------------------------------------------------

    def _run_drafted(
        self,
        step: SchedulerOutput,
        inputs: StepInput,
        trees: TreeTokens,
        planned: PlannedMasks | None,
    ) -> ModelRunnerOutput:
        """Runs a step with drafts and verifies them."""
        is_tree = trees.is_tree > 0
        ends = np.cumsum(step.num_scheduled_tokens)
        firsts = np.where(is_tree, ends - step.num_scheduled_tokens, ends - 1)
        counts = np.where(is_tree, step.num_scheduled_tokens, np.minimum(step.num_samples, 1))
        sequences = np.repeat(np.arange(len(counts)), counts)
        within = np.arange(len(sequences)) - (np.cumsum(counts) - counts)[sequences]
        after = firsts[sequences] + within  # every token of a tree, the last one of other sequences
        if step.prompt_logprob_spans or self.typical is not None or self._needs_logits(step):
            logits, prompt_logprobs = self._logits(step, inputs, after)
            table = logits.numpy()

            def logits_after(visited: np.ndarray) -> torch.Tensor:
                return torch.from_numpy(table[np.searchsorted(after, visited)])

            drafted = DraftedStep(step, trees, inputs.slot_mapping, logits_after, [])
            output = verify(drafted, self._sampler, self._cache, typical=self.typical)
            return replace(output, prompt_logprobs=prompt_logprobs)
        num_samples = np.where(is_tree, 1, step.num_samples)[sequences]
        sampled, errors = self._run_sampling(
            step, inputs, sequences, after, num_samples, planned=planned
        )
        num_sampled = np.where(is_tree, step.num_scheduled_tokens, step.num_samples).tolist()
        output = self._verify_sampled(step, trees, inputs.slot_mapping, sampled, num_sampled)
        self._observe_sampled(step, planned, output)
        return replace(output, errors=errors)

    def _verify_sampled(
        self,
        step: SchedulerOutput,
        trees: TreeTokens,
        slot_mapping: np.ndarray,
        sampled: list[int],
        num_sampled: list[int],
    ) -> ModelRunnerOutput:
        """Verifies trees after whose every node the library has sampled.

        Args:
            sampled: all sampled tokens, `num_sampled` for each sequence.
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
        self, step: SchedulerOutput, inputs: StepInput, after: np.ndarray
    ) -> tuple[torch.Tensor, dict[int, list[SampleLogprobs]]]:
        """Runs a step for logits and for the wanted log-probabilities of prompts.

        With the latter it runs the step in pieces, so that no more logits are held at once than
        those of the result and of `PROMPT_LOGPROB_TOKENS` prompt tokens. Pieces begin within
        prompts: no tree is cut.

        Args:
            after: [N] indices of tokens in the step, ascending.

        Returns:
            [N, vocab] logits after these tokens, and by request slot the log-probabilities.
        """
        if not step.prompt_logprob_spans:
            return self._executor.logits(inputs, after), {}
        wanted, targets, counts = self._prompt_targets(step)
        logits: list[torch.Tensor] = []
        found: list[SampleLogprobs] = []
        limits = [0, *wanted[PROMPT_LOGPROB_TOKENS::PROMPT_LOGPROB_TOKENS], len(inputs.token_ids)]
        for low, high in zip(limits[:-1], limits[1:], strict=True):
            first, last = np.searchsorted(wanted, (low, high)).tolist()
            own = after[(after >= low) & (after < high)]
            indices = np.concatenate((own, wanted[first:last])) - low
            values = self._executor.logits(_part_of(inputs, low, high), indices)
            logits.append(values[: len(own)].clone())
            of_prompts = values[len(own) :]
            found += token_logprobs(of_prompts, targets[first:last], counts[first:last]).to_host()
        by_slot: dict[int, list[SampleLogprobs]] = {}
        begin = 0
        for span in step.prompt_logprob_spans:
            by_slot[int(step.request_slots[span.index])] = found[begin : begin + span.count]
            begin += span.count
        return torch.cat(logits), by_slot

    def _prompt_targets(self, step: SchedulerOutput) -> tuple[np.ndarray, torch.Tensor, list[int]]:
        """For every wanted prompt token its index in the step, ascending, the token that follows,
        and how many of the most likely tokens are wanted."""
        indices: list[np.ndarray] = []
        targets: list[int] = []
        counts: list[int] = []
        for span in step.prompt_logprob_spans:
            state = self._prompts[int(step.request_slots[span.index])]
            first, following = prompt_targets(step, span, state)
            indices.append(np.arange(first, first + span.count))
            targets += following
            counts += [state.num_prompt_logprobs] * span.count
        joined = np.concatenate(indices)
        assert (joined[1:] > joined[:-1]).all(), "spans are in the order of their sequences"
        return joined, torch.tensor(targets), counts


def _part_of(inputs: StepInput, low: int, high: int) -> StepInput:
    """Tokens low .. high - 1 of a step; earlier ones have their KV in the cache. Cuts no tree."""
    ends = np.cumsum(inputs.num_scheduled_tokens)
    firsts = ends - inputs.num_scheduled_tokens
    chosen = (ends > low) & (firsts < high)
    begins, stops = np.maximum(firsts[chosen], low), np.minimum(ends[chosen], high)
    computed = inputs.num_computed_tokens[chosen] + begins - firsts[chosen]
    return StepInput(
        token_ids=inputs.token_ids[low:high],
        positions=inputs.positions[low:high],
        slot_mapping=inputs.slot_mapping[low:high],
        request_slots=inputs.request_slots[chosen],
        num_computed_tokens=computed.astype(np.int32),
        num_scheduled_tokens=(stops - begins).astype(np.int32),
        bases=inputs.bases[chosen],
        is_tree=inputs.is_tree[chosen],
        ancestors=inputs.ancestors[low:high],
        block_tables=inputs.block_tables,
        adapter_slots=None if inputs.adapter_slots is None else inputs.adapter_slots[chosen],
    )
