"""Runs steps on a CUDA device: one step input buffer in, one graph, a few results out.

A step takes one way, from `launch` to `finish`:

1. The host applies the step's changes and fills its input buffer (`fill_step`).
2. The device fetches the buffer, runs the model, samples and verifies (`device_step`), by replaying
   a graph (`graph_set`) or, in steps larger than every graph, uncaptured.
3. The results arrive in page-locked memory, where `finish` reads them.

Sampling that needs more than temperature and thresholds (log-probabilities, penalties, users'
processors) goes through the torch sampler behind the model, and uses the same kernel in the end.
Beside draft trees it comes in `finish`, one depth after the other (`runner.verify`); the step
itself then verifies no tree.

Token masks reach the sampling kernel through memory that it reads, while the step runs
(`token_masks`). Only beside draft trees that are verified in `finish`, and beside processors that
look back, the torch sampler applies them.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np
import torch

from hetero_llm.core.acceptance import TypicalAcceptance
from hetero_llm.core.draft_tree import DraftBatch
from hetero_llm.core.grammar import OpenMatcher
from hetero_llm.core.step import AdmittedSequence, ModelRunnerOutput, SchedulerOutput
from hetero_llm.gpu.adapters import AdapterUse, GpuAdapters, NoGpuAdapters
from hetero_llm.gpu.attention_context import AttentionContext, check_supported
from hetero_llm.gpu.device_step import DeviceStep
from hetero_llm.gpu.fill_step import StepFiller
from hetero_llm.gpu.gathered_kv import GatheredKV, NoStepSharer, SharedRows, StepSharer
from hetero_llm.gpu.graph_set import DraftedSizes, GraphSet, StepGraphs, is_short, step_buckets
from hetero_llm.gpu.hybrid_experts import HybridExperts, NoHybridExperts
from hetero_llm.gpu.kernels.layer_ready import MOST_LOOKS
from hetero_llm.gpu.kernels.sample import (
    MASK_PLACE,
    POSITION,
    ROW_FIELDS,
    SAMPLE_INDEX,
    SampleRows,
)
from hetero_llm.gpu.kernels.tree_verify import VerifiedTrees
from hetero_llm.gpu.layer_ready import DeviceLayerReadyFlags
from hetero_llm.gpu.paged_attention import LibraryPlanner, LibraryRows, StepAttention
from hetero_llm.gpu.sampled_rows import SampledRowsPlanner
from hetero_llm.gpu.step_buffer import LEAST_WRITES, DeviceStepBuffers
from hetero_llm.gpu.token_masks import DeviceTokenMasks, StepMasks
from hetero_llm.models.collectives import NO_LINK, StageLink
from hetero_llm.models.config import ModelConfig
from hetero_llm.models.layers import Attend, CausalLM
from hetero_llm.runner.kv_cache import PagedKVCache
from hetero_llm.runner.layer_ready import LayerReadyAttention
from hetero_llm.runner.model_runner import (
    PendingStep,
    arm_layer_ready,
    drafted_step,
    observe_inputs,
    plain_output,
    sample_step,
)
from hetero_llm.runner.sequence_parallel import (
    NO_SEQUENCE_PARALLEL,
    NoSequenceParallel,
    SequenceParallel,
)
from hetero_llm.runner.split_step import SplitStep
from hetero_llm.runner.upload import upload
from hetero_llm.runner.verify import DraftedStep, verify
from hetero_llm.sampling.sampler import Sampler
from hetero_llm.spec_decode.verify import tree_tokens
from hetero_llm.utils.jit import njit

_NO_PLACES = np.zeros(0, np.int32)
_RESULTS = 4
"""Places for results: more than the steps that run at once."""


@dataclass(slots=True)
class LaunchedStep:
    """A launched step.

    Attributes:
        results: the step, and what the torch sampler adds to its tokens.
        tokens: int64 in page-locked memory, valid once `arrived` has happened: the sampled tokens,
            or with draft trees a packed `VerifiedTrees` of `num_groups` groups.
        drafted: a step whose sampling is still to come, in `finish`; `tokens` mean nothing then.
        masks: of the step's samples; None: the sampling kernel applies none.
        adapter_turn: for `GpuAdapters.check`; None: the step does not wait for adapters.
    """

    results: PendingStep
    tokens: np.ndarray
    arrived: torch.cuda.Event | None
    num_groups: int = 0
    drafted: DraftedStep | None = None
    masks: StepMasks | None = None
    adapter_turn: int | None = None

    def wait(self) -> None:
        """Waits until the tokens have arrived."""
        if self.arrived is not None:
            self.arrived.synchronize()


class ResultRing:
    """Places in page-locked memory for the results of steps, taken in turn, each with an event.

    Attributes:
        ring: [places, size] int64.
    """

    def __init__(self, size: int, *, pin: bool) -> None:
        self.ring = torch.zeros(_RESULTS, size, dtype=torch.int64, pin_memory=pin)
        self._places = [
            (place, place.numpy(), torch.cuda.Event() if pin else None) for place in self.ring
        ]
        self._next = 0

    def take(self) -> tuple[torch.Tensor, np.ndarray, torch.cuda.Event | None]:
        """The next place as a tensor and as an array of the same memory, and its event."""
        place = self._places[self._next]
        self._next = (self._next + 1) % _RESULTS
        return place


# large: every way of a step needs most of what `__init__` makes.
class GpuModelRunner:
    """Owns the KV cache, the block tables, sampling state and graphs.

    Args:
        model: a module of `hetero_llm.models` on a CUDA device.
        config: its configuration.
        cache: the paged KV cache on the same device.
        max_num_seqs: request slots.
        max_model_len: longest sequence, in tokens.
        max_num_batched_tokens: most tokens of a step.
        graphs: capture graphs now (seconds) and replay them.
        capture_prompts: capture steps of more tokens than usual, too; see `graph_set`.
        most_drafted_tokens: most tokens of a step with draft trees; 0: there are no such steps.
        layer_ready: what steps with `kv_loads` wait at; None: there will be no such steps.
        adapters: of the model's products; None: it has none.
        experts: of the model's mixtures, some of them on the host; None: all are on the device.
        link: to the neighbouring stages, where the model is one of several; those before the last
            one sample nothing.
        most_looks: see `kernels.sample.MaskPlaces`.
        sequence: which steps other ranks share.
        dry: it can run no step; it is made for its `bodies`, without waiting for a compiler.

    Attributes:
        model, cache, layer_ready: see Args.
        experts: see Args, or a `NoHybridExperts`.
        typical: see `runner.verify`, which then samples for all draft trees; to be set before the
            first step.
        filler: fills the input buffers.
        graphs: None: all steps run uncaptured.
        bodies: of a dry runner: the steps that would be captured and what else a start runs, for
            `compile_ahead`.
    """

    # large: the sizes of a step decide those of all parts.
    def __init__(
        self,
        model: CausalLM,
        config: ModelConfig,
        cache: PagedKVCache,
        *,
        max_num_seqs: int,
        max_model_len: int,
        max_num_batched_tokens: int,
        graphs: bool,
        capture_prompts: bool = False,
        most_drafted_tokens: int = 0,
        layer_ready: DeviceLayerReadyFlags | None = None,
        adapters: GpuAdapters | None = None,
        experts: HybridExperts | None = None,
        link: StageLink = NO_LINK,
        most_looks: int = MOST_LOOKS,
        sequence: SequenceParallel | NoSequenceParallel = NO_SEQUENCE_PARALLEL,
        dry: bool = False,
    ) -> None:
        check_supported(config)
        rank = model.config.rank
        self._is_first, self._is_last, self._link = rank.is_first, rank.is_last, link
        device, dtype = cache.data.device, next(model.parameters()).dtype
        columns = -(-max_model_len // cache.shape.block_size)
        block_tables = torch.zeros(max_num_seqs, columns, dtype=torch.int32, device=device)
        self.experts = experts or NoHybridExperts()
        most_rows = self.experts.most_rows  # of a captured step
        buckets = step_buckets(
            min(max_num_seqs, most_rows),
            min(max_num_batched_tokens, most_rows),
            most_drafted_tokens=most_drafted_tokens,
            prompts=graphs and capture_prompts,
        )
        max_graph_tokens, max_decode_tokens = buckets.tokens[-1], buckets.decode[-1]
        max_tokens = max(max_num_batched_tokens, buckets.most_tokens, max_decode_tokens)
        max_samples = max(
            *(max_num_seqs, max_graph_tokens, max_decode_tokens),
            min(most_drafted_tokens, max_tokens),
        )
        self.typical: TypicalAcceptance | None = None
        self.model = model
        self.cache = cache
        self.layer_ready = layer_ready
        self._adapters = adapters or NoGpuAdapters()
        self._context = AttentionContext(config, cache, block_tables, dtype)
        self._library = LibraryPlanner(self._context, dtype, max_num_batched_tokens)
        self._sampled_rows = SampledRowsPlanner(self._context, max_num_seqs)
        self._sharer: StepSharer | NoStepSharer = NoStepSharer()
        if isinstance(sequence, SequenceParallel):
            self._sharer = StepSharer(self._context, sequence, max_tokens=max_num_batched_tokens)
        self._buffers = DeviceStepBuffers(
            self._context,
            max_num_seqs=max_num_seqs,
            max_tokens=max_num_batched_tokens,
            max_graph_tokens=max_graph_tokens,
            max_prompt_tokens=buckets.most_tokens,
            max_decode_tokens=max_decode_tokens,
            drafts=most_drafted_tokens > 0,
        )
        self.filler = StepFiller(
            self._buffers.num_words,
            block_tables,
            block_size=cache.shape.block_size,
            vocab_size=config.vocab_size,
            windows=self._context.windows,
            compiles=not dry,
        )
        pin = device.type == "cuda"  # else Triton's interpreter: for tests
        self._copied = ResultRing(2 * max_samples, pin=pin)  # of uncaptured steps
        self._sent = ResultRing(2 * max_samples, pin=pin)  # of captured ones, whose kernel sends
        self._sampler = Sampler(max_num_seqs, config.vocab_size, device, self._sample_processed)
        self._masks = DeviceTokenMasks(
            self._sampler.masks,
            config.vocab_size,
            max(max_num_seqs, min(max_graph_tokens, most_drafted_tokens)),
            pin=pin,
            most_looks=most_looks,
        )
        self._device_step = DeviceStep(
            model,
            config,
            cache,
            block_tables,
            self.filler.ring,
            self._sent.ring,
            self._masks.places,
            self._adapters,
            self.experts,
            max_graph_tokens=max_graph_tokens,
            max_prompt_tokens=buckets.most_tokens,
            max_tokens=max_tokens,
            max_samples=max_samples,
        )
        self._prompts: dict[int, AdmittedSequence] = {}  # of slots that want prompt_logprobs
        self.graphs: StepGraphs | None = None
        self.bodies: list[Callable[[], None]] = []
        if graphs:
            steps = StepGraphs(
                GraphSet(),
                self._device_step,
                self.filler,
                self._buffers,
                self._context,
                buckets=buckets,
                layer_ready=layer_ready,
                adapters=adapters is not None,
                adapter_loads=self._adapters.overlaps_loads,
            )
            if dry:
                others = (self._device_step.run_large_mixture, self._sample_padding)
                self.bodies = [*steps.bodies, *others]
            else:
                self.graphs = steps
        if not dry:
            self._warm_up()

    def _warm_up(self) -> None:
        """What would take seconds in a request: tries libraries, compiles, captures."""
        self._library.try_libraries()
        none, no_ints = np.zeros(0, np.int64), np.zeros(0, np.int32)
        _read_verified(none, 0, no_ints, no_ints, none, none)  # compiles, as the next one
        _drafted_sizes(no_ints, no_ints, no_ints, no_ints)
        self._sample_padding()
        if self.graphs is not None:
            self.graphs.capture()
            self._device_step.run_large_mixture()

    def _sample_padding(self) -> None:
        """Processors leave logits in float32, for which no captured step compiles the kernels."""
        if self._is_last:
            device = self.cache.data.device
            logits = torch.zeros((1, self._context.config.vocab_size), device=device)
            padding = torch.zeros((ROW_FIELDS, 1), dtype=torch.int32, device=device)
            padding[POSITION] = -1
            self._device_step.sample_processed(logits, SampleRows(padding))

    @property
    def profile(self) -> list[tuple[int, float]]:
        """See `StepGraphs`, but for all stages, which take about as long each; empty without
        graphs."""
        profile = [] if self.graphs is None else self.graphs.profile
        stages = self.model.config.rank.stages
        return [(tokens, stages * seconds) for tokens, seconds in profile]

    # -- a step -----------------------------------------------------------------------------

    def set_open_matcher(self, open_matcher: OpenMatcher) -> None:
        """Sets what opens the grammars of admitted sequences; call it before one has any."""
        self._sampler.masks.open_matcher = open_matcher

    def launch(self, step: SchedulerOutput) -> LaunchedStep:
        """Issues all device work of a step."""
        self.experts.before_launch(step.num_scheduled_tokens, link_is_busy=bool(step.kv_loads))
        adapted = None
        if self._is_one_replay(step):
            if step.block_table_writes.shape[1]:
                self.filler.write_tables(step.block_table_writes)
            if self._sampler.has_history:
                observe_inputs(self._sampler, step)
            masks = self._plan_masks(step, plain=True)
            adapted = self._adapters.prepare(step)
            launched = self._replay_verify(step, drafted_sizes(step), plain=True, adapted=adapted)
            if launched is not None:
                self._start_masks(masks)
                return self._completed(launched, masks, adapted)
        return self._launch(step, adapted)

    def _plan_masks(self, step: SchedulerOutput, *, plain: bool) -> StepMasks | None:
        """Takes places for the masks of a step and hands them to the filler. `_start_masks` has to
        follow.

        Args:
            plain: the kernels verify the step's draft trees, if it has any.
        """
        masks = None
        if plain or step.drafts is None:
            masks = self._masks.plan(step, self._sampler.is_masked_later)
        self.filler.mask_places = _NO_PLACES if masks is None else masks.places
        return masks

    def _start_masks(self, masks: StepMasks | None) -> None:
        """Lets the masks of a step be written: behind the replay of its graphs, which the thread
        that writes them would delay, and before anything else, in which a kernel may be compiled
        while another awaits the masks."""
        if masks is not None:
            self._masks.start_fill(masks)

    def _completed(
        self, launched: LaunchedStep, masks: StepMasks | None, adapted: AdapterUse
    ) -> LaunchedStep:
        """Notes what `finish` has to check, and how the grammars of the step's masks get to see its
        tokens."""
        if masks is not None:
            launched.masks = masks
            self._masks.launched(masks, partial(_wait_for_tokens, launched))
        if adapted is AdapterUse.LOADING:
            launched.adapter_turn = self._adapters.turn
        return launched

    def _is_one_replay(self, step: SchedulerOutput) -> bool:
        """Whether all that a step takes is to replay a graph with drafts, if one holds it. The
        device waits for such steps, which call no operator of torch: so they need not enter the
        inference mode, which takes 8 us."""
        return (
            step.drafts is not None
            and self.graphs is not None
            and self.typical is None
            and self._is_first
            and self._is_last
            and not step.admitted
            and not step.adapter_loads
            and not step.prompt_logprob_spans
            and not step.block_copies.shape[1]
            and step.block_table_writes.shape[1] <= LEAST_WRITES
            and self._sampler.all_plain
        )

    @torch.inference_mode()
    def _launch(self, step: SchedulerOutput, adapted: AdapterUse | None) -> LaunchedStep:
        """`adapted`: None: the adapters are not prepared for the step yet."""
        if adapted is None:
            adapted = self._adapters.prepare(step)  # early: it starts copies
        if step.kv_loads:
            arm_layer_ready(self.layer_ready, step)
        elif adapted is AdapterUse.LOADING and self.layer_ready is not None:
            self.layer_ready.arm(())  # graphs that wait for adapters wait for KV, too
        self._apply_changes(step)
        part = self._sharer.split(step)
        if part is not None:
            return self._launch_shared(step, part, adapted=adapted)
        num_tokens = int(step.num_scheduled_tokens.sum())
        if not self._is_first:
            self._link.receive(self._device_step.stage_input[:num_tokens])
        if not self._is_last:
            return self._launch_for_next_stage(step, num_tokens, adapted=adapted)
        if step.drafts is not None:
            return self._launch_drafted(step, step.drafts, adapted=adapted)
        plain = not step.prompt_logprob_spans and self._sampler.is_plain(step.request_slots)
        masks = self._plan_masks(step, plain=plain)
        kind = None
        if self.graphs is not None:
            kind = self.graphs.replay_step(step, num_tokens, plain=plain, adapted=adapted)
        self._start_masks(masks)
        if kind == "decode":
            return self._completed(self._sent_results(step, num_tokens), masks, adapted)
        hidden, sampled_rows = self._device_step.hidden[:num_tokens], False
        if kind is None:
            hidden, sampled_rows = self._run_uncaptured(
                step, num_tokens, plain=plain, adapted=adapted
            )
        if plain:
            num_samples = int(step.num_samples.sum())
            launched = self._copy_results(step, self._device_step.tokens[:num_samples])
        else:
            launched = self._sample_by_torch(step, hidden, sampled_rows=sampled_rows)
        self._note_loads(launched)
        return self._completed(launched, masks, adapted)

    def finish(self, pending: LaunchedStep) -> ModelRunnerOutput:
        """Waits for a launched step and returns its results as plain data. Steps finish in the
        order of their launches.

        Raises:
            RuntimeError: an adapter of the step has not reached the device, or an answer of CPU
                threads that compute experts has not.
        """
        pending.wait()
        self.experts.finished()
        if pending.adapter_turn is not None:
            self._adapters.check(pending.adapter_turn)
        if pending.drafted is not None:
            last_tokens = self._device_step.last_tokens
            with torch.inference_mode():
                return verify(pending.drafted, self._sampler, self.cache, last_tokens, self.typical)
        errors = {} if pending.masks is None else self._masks.finish(pending.masks)
        if pending.num_groups:
            output = verified_output(pending.results.step, pending.tokens, pending.num_groups)
            return dataclasses.replace(output, errors=errors) if errors else output
        output = plain_output(pending.tokens.tolist(), pending.results)
        if errors:
            output = dataclasses.replace(output, errors=output.errors | errors)
        turn = pending.results.turn
        if turn is None:
            return output
        assert self.layer_ready is not None
        return dataclasses.replace(output, kv_loads_timed_out=self.layer_ready.take_error(turn))

    def _launch_for_next_stage(
        self, step: SchedulerOutput, num_tokens: int, *, adapted: AdapterUse
    ) -> LaunchedStep:
        """Runs this stage's layers and sends what they leave to the next stage; its step has no
        results. Draft trees are verified by the last stage."""
        self.filler.mask_places = _NO_PLACES
        sizes = None if step.drafts is None else drafted_sizes(step)
        replayed: object = None
        if self.graphs is not None and sizes is None:
            replayed = self.graphs.replay_step(step, num_tokens, plain=True, adapted=adapted)
        elif self.graphs is not None and sizes is not None:
            replayed = self.graphs.replay_verify(step, sizes, plain=True, adapted=adapted)
        if replayed is not None:  # a copy: the next step may overwrite it before this one is sent
            hidden = self._device_step.hidden[:num_tokens].clone()
        elif sizes is None:
            hidden, _ = self._run_uncaptured(step, num_tokens, plain=False, adapted=adapted)
        else:
            verified = self._device_step.verified.part(sizes.num_groups, sizes.num_samples)
            hidden = self._verify_uncaptured(step, verified, plain=False, adapted=adapted)
        self._link.send(hidden)
        launched = self._copy_results(step, self._device_step.tokens[:0])
        self._note_loads(launched)
        return self._completed(launched, None, adapted)

    def _note_loads(self, launched: LaunchedStep) -> None:
        """Notes for `finish` whose waits for loads may have timed out."""
        if launched.results.step.kv_loads:
            assert self.layer_ready is not None
            launched.results.turn = self.layer_ready.turn

    def _apply_changes(self, step: SchedulerOutput) -> None:
        """Admitted sequences, block tables on the host, copies of blocks."""
        for state in step.admitted:
            self.filler.sampling.admit(state)
            if not self._is_last:
                continue
            self._sampler.admit(state)
            if state.params.prompt_logprobs is not None:
                self._prompts[state.request_slot] = state
        if self._sampler.has_history:
            observe_inputs(self._sampler, step)
        if step.block_table_writes.shape[1]:
            self.filler.write_tables(step.block_table_writes)
        copies = step.block_copies
        if copies.shape[1]:
            if step.kv_loads and self.layer_ready is not None:  # a source may be loading
                self.layer_ready.wait(self.cache.shape.num_layers - 1)
            self.cache.copy_blocks(list(zip(*copies.tolist(), strict=True)))

    def _launch_drafted(
        self, step: SchedulerOutput, drafts: DraftBatch, *, adapted: AdapterUse
    ) -> LaunchedStep:
        sizes = drafted_sizes(step)
        plain = (
            self.typical is None
            and not step.prompt_logprob_spans
            and self._masks.fits(sizes.num_samples)
            and (
                self._sampler.all_plain
                or self._sampler.is_plain(step.request_slots[step.num_samples > 0])
            )
        )
        masks = self._plan_masks(step, plain=plain)
        launched = self._replay_verify(step, sizes, plain=plain, adapted=adapted)
        self._start_masks(masks)
        hidden = self._device_step.hidden
        if launched is None:
            verified = self._device_step.verified.part(sizes.num_groups, sizes.num_samples)
            hidden = self._verify_uncaptured(step, verified, plain=plain, adapted=adapted)
            launched = self._copy_results(step, verified.packed)
            launched.num_groups = sizes.num_groups
        if not plain:
            hidden = hidden[: sizes.num_tokens]
            if not self._is_first:  # chunks may run before this step is finished
                hidden = hidden.clone()
            launched.drafted = self._drafted_step(step, drafts, hidden)
        return self._completed(launched, masks, adapted)

    def _launch_shared(
        self, step: SchedulerOutput, part: SplitStep, *, adapted: AdapterUse
    ) -> LaunchedStep:
        """A step of which this rank computes a part. All ranks sample all of its samples: by the
        torch sampler, since the step input buffer has those of the part."""
        assert isinstance(self._sharer, StepSharer)
        drafts, tables = step.drafts, self.filler.block_tables
        samples = drafts is None and not step.prompt_logprob_spans
        masks = self._plan_masks(step, plain=False)
        self._start_masks(masks)
        rows = self._sharer.send(step, part, tables, samples=samples)
        if drafts is not None:
            sizes = drafted_sizes(rows.own)
            verified = self._device_step.verified.part(sizes.num_groups, sizes.num_samples)
            hidden = self._verify_uncaptured(
                rows.own, verified, plain=False, adapted=adapted, kv=rows.kv
            )
            launched = self._copy_results(step, self._device_step.tokens[:0])
            launched.drafted = self._drafted_step(step, drafts, rows.gather(hidden))
        else:
            hidden, sampled_rows = self._run_uncaptured(
                rows.own, int(rows.own.num_scheduled_tokens.sum()),
                plain=False, adapted=adapted, shared=rows,
            )  # fmt: skip
            if samples and not sampled_rows:
                hidden = rows.own_samples(hidden)
            launched = self._sample_by_torch(step, rows.gather(hidden), sampled_rows=samples)
        return self._completed(launched, masks, adapted)

    def _replay_verify(
        self, step: SchedulerOutput, sizes: DraftedSizes, *, plain: bool, adapted: AdapterUse
    ) -> LaunchedStep | None:
        """Replays the graph of a step with drafts; None if no graph holds the step."""
        if self.graphs is None:
            return None
        layout = self.graphs.replay_verify(step, sizes, plain=plain, adapted=adapted)
        if layout is None:
            return None
        launched = self._sent_results(step, layout.groups + layout.samples)
        launched.num_groups = layout.groups
        return launched

    def _drafted_step(
        self, step: SchedulerOutput, drafts: DraftBatch, hidden: torch.Tensor
    ) -> DraftedStep:
        """Prepares sampling by depth in `finish`.

        Args:
            hidden: [T, hidden], which stays as it is until then.
        """
        trees = tree_tokens(step, drafts)
        size, places = self.cache.shape.block_size, trees.kv_indices
        blocks = self.filler.block_tables[
            np.repeat(step.request_slots, step.num_scheduled_tokens), places // size
        ]
        return drafted_step(
            self.model,
            hidden,
            step,
            trees=trees,
            slot_mapping=blocks * size + places % size,
            prompts=self._prompts,
        )

    # -- steps without a graph --------------------------------------------------------------

    def _run_uncaptured(
        self,
        step: SchedulerOutput,
        num_tokens: int,
        *,
        plain: bool,
        adapted: AdapterUse,
        shared: SharedRows | None = None,
    ) -> tuple[torch.Tensor, bool]:
        """Issues the kernels of a step without drafts. If plain, it samples, too.

        Args:
            shared: of which the step is this rank's part; None: it is a whole one.

        Returns:
            [T, hidden] and False, or, where the last layer leaves out what nothing reads, [N,
            hidden] of the rows of the N samples and True.
        """
        single = shared is None and len(step.request_slots) == num_tokens
        library: tuple[LibraryRows, ...] = ()
        planned = sampled = None
        if not single:
            all_rows = bool(step.prompt_logprob_spans) if shared is None else not shared.of_samples
            if adapted and max(1, int(step.num_samples.sum())) == num_tokens:
                all_rows = True  # `GpuAdapters` knows the rows of a product by their number
            if self.model.selects_rows and not all_rows:
                sampled = self._sampled_rows.plan(step)
            library, planned = self._library.plan(
                step.request_slots,
                step.num_computed_tokens,
                step.num_scheduled_tokens,
                self.filler.block_tables,
            )
        short = single and is_short(step.num_computed_tokens + 1, self._context)
        if single:  # as the graphs do
            tile = self._context.decode_tile(num_tokens, short=short)
        else:
            tile = self._context.chunk_tile(num_tokens)
        num_samples = int(step.num_samples.sum())
        buffer = self._buffers.exact(step, tile, samples=num_samples, groups=0, cut=not short)
        any_cut = self.filler.fill(step, buffer, planned)
        attention: Attend = StepAttention(
            self._context,
            buffer.inputs,
            tile,
            any_cut=any_cut,
            library=library,
            planned=planned is None or bool(planned.any()),
            sampled=sampled,
            kv=None if shared is None else shared.kv,
        )
        if step.kv_loads:
            assert self.layer_ready is not None
            attention = LayerReadyAttention(attention, self.layer_ready)
        selected = None if sampled is None else sampled.rows
        hidden = self._device_step.run_model(buffer, attention, adapted=adapted, selected=selected)
        if plain and num_samples:
            if sampled is None:
                self._device_step.sample(buffer.inputs, hidden, num_samples)
            else:
                self._device_step.sample_rows(buffer.inputs, hidden)
        return hidden, sampled is not None

    def _verify_uncaptured(
        self,
        step: SchedulerOutput,
        verified: VerifiedTrees,
        *,
        plain: bool,
        adapted: AdapterUse,
        kv: GatheredKV | None = None,
    ) -> torch.Tensor:
        """Issues the kernels of a step with drafts: [T, hidden]. If plain, it samples and writes
        `verified`, whose size is that of the step, too. `kv`: see `StepAttention`."""
        short = is_short(step.num_computed_tokens + step.num_scheduled_tokens, self._context)
        tile = self._context.tree_tile(int(step.num_scheduled_tokens.sum()), short=short)
        groups = len(verified.counts)
        samples = len(verified.packed) - groups
        buffer = self._buffers.exact(step, tile, samples=samples, groups=groups, cut=not short)
        every = np.ones(len(step.request_slots), np.bool_)  # a part may have more than slots
        any_cut = self.filler.fill(step, buffer, every)
        attention = StepAttention(self._context, buffer.inputs, tile, any_cut=any_cut, kv=kv)
        hidden = self._device_step.run_model(buffer, attention, adapted=adapted)
        if plain:
            self._device_step.verify_trees(buffer.inputs, hidden, verified)
        return hidden

    # -- sampling by torch, and results -----------------------------------------------------

    def _sample_by_torch(
        self, step: SchedulerOutput, hidden: torch.Tensor, *, sampled_rows: bool
    ) -> LaunchedStep:
        """Sampling and log-probabilities of a step that the kernels alone do not serve.

        Args:
            hidden, sampled_rows: see `_run_uncaptured`.
        """
        results = sample_step(
            self.model,
            hidden,
            step,
            self._sampler,
            self._device_step.last_tokens,
            self._prompts,
            sampled_rows=sampled_rows,
            masked_later=True,
        )
        results.prompt_logprobs = [
            (slot, rows.start_download()) for slot, rows in results.prompt_logprobs
        ]
        sampled = results.sampled
        if sampled is None:
            return self._copy_results(step, self._device_step.tokens[:0], results)
        if sampled.logprobs is not None:
            sampled.logprobs = sampled.logprobs.start_download()
        return self._copy_results(step, sampled.token_ids, results)

    def _sample_processed(
        self,
        logits: torch.Tensor,
        slots: np.ndarray,
        positions: np.ndarray,
        sample_indices: np.ndarray,
    ) -> torch.Tensor:
        """What the torch sampler samples with: see `sampling.sampler.SampleProcessed`."""
        packed = np.take(self.filler.sampling.packed, slots, axis=1)
        packed[SAMPLE_INDEX], packed[POSITION] = sample_indices, positions
        places = self.filler.mask_places
        if len(places):
            packed[MASK_PLACE] = places + 1
            logits = logits.clone()  # log-probabilities are those of the unmasked ones
        rows = SampleRows(upload(packed, logits.device))
        return self._device_step.sample_processed(logits, rows)

    def _sent_results(self, step: SchedulerOutput, count: int) -> LaunchedStep:
        """The step whose graph was replayed last and sends `count` results."""
        _, array, event = self._sent.take()
        if event is not None:
            event.record()
        return LaunchedStep(PendingStep(step, None, []), array[:count], event)

    def _copy_results(
        self, step: SchedulerOutput, tokens: torch.Tensor, results: PendingStep | None = None
    ) -> LaunchedStep:
        """Copies the results of a step whose graph has not sent them."""
        place, array, event = self._copied.take()
        count = len(tokens)
        place[:count].copy_(tokens, non_blocking=True)
        if event is not None:
            event.record()
        return LaunchedStep(results or PendingStep(step, None, []), array[:count], event)


def _wait_for_tokens(launched: LaunchedStep) -> tuple[Sequence[int], Sequence[int]]:
    """See `token_masks.WaitForTokens`."""
    launched.wait()
    step = launched.results.step
    if launched.num_groups:
        output = verified_output(step, launched.tokens, launched.num_groups)
        assert output.num_tokens is not None
        return output.token_ids, output.num_tokens
    return launched.tokens.tolist(), step.num_samples.tolist()


def drafted_sizes(step: SchedulerOutput) -> DraftedSizes:
    """The sizes of a step with drafts."""
    drafts = step.drafts
    assert drafts is not None
    return DraftedSizes(
        *_drafted_sizes(
            step.num_computed_tokens, step.num_scheduled_tokens, step.num_samples, drafts.counts
        )
    )


@njit(cache=True, nogil=True)
def _drafted_sizes(
    num_computed_tokens: np.ndarray,
    num_scheduled_tokens: np.ndarray,
    num_samples: np.ndarray,
    nodes: np.ndarray,
) -> tuple[int, int, int, int, int]:
    """The fields of `DraftedSizes`. `nodes`: [S] nodes of each sequence's tree."""
    tokens = samples = groups = longest = keys = 0
    for sequence in range(len(nodes)):
        count = num_scheduled_tokens[sequence]
        context = num_computed_tokens[sequence] + count
        tokens += count
        samples += count if nodes[sequence] > 0 else num_samples[sequence]
        groups += 1 if nodes[sequence] > 0 else num_samples[sequence]
        longest, keys = max(longest, context), keys + context
    return tokens, samples, groups, longest, keys


def verified_output(
    step: SchedulerOutput, packed: np.ndarray, num_groups: int
) -> ModelRunnerOutput:
    """The tokens of a step with draft trees.

    Args:
        packed: [G + N] int64, a `VerifiedTrees.packed` of G = `num_groups` groups, those of padding
            included.
    """
    drafts = step.drafts
    assert drafts is not None
    num_tokens = np.empty(len(step.request_slots), np.int64)
    token_ids = np.empty(len(packed) - num_groups, np.int64)
    total = _read_verified(
        packed, num_groups, drafts.counts, step.num_samples, token_ids, num_tokens
    )
    token_ids = token_ids[:total]
    return ModelRunnerOutput(
        token_ids.tolist(), None, {}, {}, num_tokens.tolist(), arrays=(token_ids, num_tokens)
    )


@njit(cache=True, nogil=True)
def _read_verified(
    packed: np.ndarray,
    num_groups: int,
    nodes: np.ndarray,
    num_samples: np.ndarray,
    token_ids: np.ndarray,
    num_tokens: np.ndarray,
) -> int:
    """Gathers the tokens of all sequences in `token_ids` and writes how many each got to
    `num_tokens`, [S]. Returns their sum. `nodes`: [S] nodes of each sequence's tree."""
    total = group = 0
    sample = num_groups
    for sequence in range(len(nodes)):
        if nodes[sequence] > 0:
            emitted, sampled = packed[group], nodes[sequence] + 1
            group += 1
        else:  # every sample is a group of one
            emitted = sampled = num_samples[sequence]
            group += sampled
        num_tokens[sequence] = emitted
        for i in range(emitted):
            token_ids[total + i] = packed[sample + i]
        total += emitted
        sample += sampled
    return total
