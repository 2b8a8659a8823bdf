"""Runs steps on a CUDA device: one packet in, one graph, a few results out.

Steps of at most 512 rows replay captured graphs: "decode" where every sequence has one row and
draws one token (model, head and draw in one graph), else "rows" (the model) and then "head" (the
draw) by their own buckets; steps with draft trees replay "verify" (model, head, draws, walk). Of
"decode" and "verify" there is a "short" kind each, for contexts that need no cut attention.
Larger steps, and with `enforce_eager` all steps, run the same functions uncaptured. Draws that need
more than temperature and thresholds (log-probabilities, penalties, users' processors) go through
the torch sampler after a "rows" graph, which draws with the same kernel. Beside draft trees they
come after a "verify" graph whose own walk is told of no tree: `finish` walks by depth then
(`runner.verify`).

Steps that read KV still on its way from host memory replay "gated rows" in place of "decode" and
"rows": the same model, whose attention waits on the device. No other graph ever waits.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

import numpy as np
import torch

from hetero_llm.core.acceptance import TypicalAcceptance
from hetero_llm.core.draft_tree import DraftBatch
from hetero_llm.core.step import AdmittedSequence, ModelRunnerOutput, SchedulerOutput
from hetero_llm.gpu.fill_step import RING, StepPacker, verified_output
from hetero_llm.gpu.graph_set import MAX_GRAPH_ROWS, GraphSet, gated_buckets, row_buckets
from hetero_llm.gpu.kernels.apply_step_inputs import apply_step_inputs
from hetero_llm.gpu.kernels.compact_kv import compact_kv
from hetero_llm.gpu.kernels.exchange import fetch_packet, send_results
from hetero_llm.gpu.kernels.paged_attention import TileShape
from hetero_llm.gpu.kernels.sample import PickRows, make_pick_workspace, pick_tokens
from hetero_llm.gpu.kernels.tree_verify import make_walk_result, walk_trees
from hetero_llm.gpu.layer_ready import DeviceGates
from hetero_llm.gpu.paged_attention import (
    AttentionContext,
    LibraryPlanner,
    LibraryRows,
    StepAttention,
    check_supported,
)
from hetero_llm.gpu.step_buffer import StepInputs
from hetero_llm.gpu.step_buffers import Packet, StepPackets
from hetero_llm.gpu.step_profile import profile_graphs
from hetero_llm.gpu.uploads import Uploads
from hetero_llm.models.config import ModelConfig
from hetero_llm.models.layers import Attend, CausalLM
from hetero_llm.runner.kv_cache import PagedKVCache
from hetero_llm.runner.layer_ready import GatedAttention
from hetero_llm.runner.model_runner import (
    PendingStep,
    arm_layer_ready,
    drafted_step,
    observe_inputs,
    plain_output,
    sample_step,
)
from hetero_llm.runner.upload import upload
from hetero_llm.runner.verify import DraftedStep, verify
from hetero_llm.sampling.sampler import Sampler
from hetero_llm.spec_decode.verify import tree_tokens

_ARRIVALS = 4
_MOST_WRITES = 1 << 18
"""Entries of block tables that one step may bring without waiting: 64 prompts of 64K tokens."""


@dataclass(slots=True)
class LaunchedStep:
    """A launched step: its tokens, int64, arrive in `tokens` (pinned) once `arrived` has happened.
    With draft trees they are a packed `WalkResult` of `num_groups` groups, or there is `drafted`:
    then the draws are still to come."""

    results: PendingStep
    tokens: np.ndarray
    arrived: torch.cuda.Event | None
    num_groups: int = 0
    drafted: DraftedStep | None = None


class _Arrivals:
    """Places in page-locked memory for steps' results, taken in turn, each with an event.

    Attributes:
        ring: [places, size] int64.
    """

    def __init__(self, size: int, pin: bool) -> None:
        self.ring = torch.zeros(_ARRIVALS, size, dtype=torch.int64, pin_memory=pin)
        self._places = [
            (tokens, tokens.numpy(), torch.cuda.Event() if pin else None) for tokens in self.ring
        ]
        self._next = 0

    def take(self) -> tuple[torch.Tensor, np.ndarray, torch.cuda.Event | None]:
        """The next place, twice, and its event."""
        place = self._places[self._next]
        self._next = (self._next + 1) % _ARRIVALS
        return place


class GpuModelRunner:
    """Owns the KV cache, the block tables, sampling state and graphs.

    Args:
        model: a module of `hetero_llm.models` on a CUDA device.
        config: its configuration.
        cache: the paged KV cache on the same device.
        max_num_seqs: slots.
        max_model_len: longest sequence, in tokens.
        max_num_batched_tokens: most rows of a step.
        graphs: capture graphs now (seconds) and replay them.
        drafts: there will be steps with draft trees.
        gates: what steps with `loads` wait at; None: there will be none.

    Attributes:
        profile: rows and seconds of steps, see `gpu.step_profile`; empty without graphs or drafts.
        typical: see `runner.verify`, which then draws for all draft trees; to be set before the
            first step.
    """

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
        drafts: bool = False,
        gates: DeviceGates | None = None,
    ) -> None:
        check_supported(config, cache.shape.dtype)
        self.typical: TypicalAcceptance | None = None
        self._gates = gates
        device = cache.data.device
        parameter = next(model.parameters())
        self._model = model
        self._cache = cache
        self._device = device
        columns = -(-max_model_len // cache.shape.block_size)
        self._tables = torch.zeros(max_num_seqs, columns, dtype=torch.int32, device=device)
        self._last_tokens = torch.zeros(max_num_seqs, dtype=torch.int64, device=device)
        self._context = AttentionContext(config, cache, self._tables, parameter.dtype)
        most_words = min(self._tables.numel(), _MOST_WRITES)
        self._uploads = Uploads(3 * most_words, device)  # of table writes
        self._library = LibraryPlanner(
            self._context, parameter.dtype, Uploads(2 * most_words, device)
        )
        self._graph_rows = row_buckets(min(MAX_GRAPH_ROWS, max_num_batched_tokens))
        self._decode_rows = row_buckets(min(MAX_GRAPH_ROWS, max_num_seqs))
        self._gated_rows = gated_buckets(self._graph_rows)
        most_rows, captured = max_num_batched_tokens, self._graph_rows[-1]
        self._packets = StepPackets(
            self._context,
            max_num_seqs=max_num_seqs,
            most_rows=most_rows,
            captured=captured,
            decoded=self._decode_rows[-1],
            drafts=drafts,
        )
        pin = device.type == "cuda"  # else Triton's interpreter: for tests
        self._packer = StepPacker(
            self._packets.words,
            max_num_seqs=max_num_seqs,
            columns=columns,
            block_size=cache.shape.block_size,
            vocab_size=config.vocab_size,
            windows=self._context.windows,
            pin=pin,
        )
        most_rows = max(most_rows, captured, self._decode_rows[-1])
        self._input_ids = torch.zeros(most_rows, dtype=torch.int32, device=device)
        most_drawn = max(max_num_seqs, captured, self._decode_rows[-1], most_rows if drafts else 0)
        self._tokens = torch.zeros(most_drawn, dtype=torch.int64, device=device)
        self._arrivals = _Arrivals(2 * most_drawn, pin)  # of steps that are not captured whole
        self._sent = _Arrivals(2 * most_drawn, pin)  # of those that are
        self._turns = torch.zeros(2, dtype=torch.int32, device=device)  # of packets, of `_sent`
        self._walked = make_walk_result(max(max_num_seqs, captured), most_drawn, device)
        self._pick = make_pick_workspace(most_drawn, config.vocab_size, device)
        self._hidden = torch.zeros(
            self._graph_rows[-1], config.hidden_size, dtype=parameter.dtype, device=device
        )
        self._sampler = Sampler(max_num_seqs, config.vocab_size, device, self._draw_processed)
        self._prompts: dict[int, AdmittedSequence] = {}  # of slots that want prompt_logprobs
        self._captured: dict[tuple[str, int], Packet] = {}
        self._graphs: GraphSet[tuple[str, int]] | None = None
        self.profile: list[tuple[int, float]] = []
        if graphs:
            self._graphs = GraphSet()
            self._capture(self._graphs, drafts)

    # -- a step -----------------------------------------------------------------------------

    @torch.inference_mode()
    def launch(self, step: SchedulerOutput) -> LaunchedStep:
        """Issues all device work of a step."""
        if step.kv_loads:
            arm_layer_ready(self._gates, step)
        self._admit(step)
        num_rows = int(step.num_scheduled_tokens.sum())
        if step.drafts is not None:
            return self._launch_drafted(step, step.drafts, num_rows)
        launched = self._launch_plain(step, num_rows)
        if step.kv_loads:
            assert self._gates is not None
            launched.results.turn = self._gates.turn
        return launched

    def _launch_plain(self, step: SchedulerOutput, num_rows: int) -> LaunchedStep:
        """A step without drafts."""
        plain = not step.prompt_logprob_spans and self._sampler.is_plain(step.request_slots)
        graphs = self._graphs
        drawn = int(step.num_samples.sum())
        if graphs is None or num_rows > self._graph_rows[-1] or drawn > self._decode_rows[-1]:
            return self._launch_eager(step, num_rows, plain)
        single = len(step.request_slots) == num_rows
        if single and plain and not step.kv_loads and bool((step.num_samples == 1).all()):
            bucket = _bucket(self._decode_rows, num_rows)
            if bucket is not None:
                short = self._context.is_short(step.num_computed_tokens + 1)
                key = ("short decode" if short else "decode", bucket)
                self._pack(step, self._captured[key])
                graphs.replay(key)
                return self._sent_by_graph(step, num_rows)
        bucket = _bucket(self._gated_rows if step.kv_loads else self._graph_rows, num_rows)
        assert bucket is not None
        key = ("gated rows" if step.kv_loads else "rows", bucket)
        self._pack(step, self._captured[key])
        graphs.replay(key)
        if not plain:
            return self._draw_by_torch(step, self._hidden[:num_rows])
        if drawn:
            heads = _bucket(self._decode_rows, drawn)
            assert heads is not None
            graphs.replay(("head", heads))
        return self._send_back(step, self._tokens[:drawn])

    def finish(self, pending: LaunchedStep) -> ModelRunnerOutput:
        """Waits for a launched step and returns its results as plain data."""
        if pending.drafted is not None:
            with torch.inference_mode():
                return verify(
                    pending.drafted, self._sampler, self._cache, self._last_tokens, self.typical
                )
        if pending.arrived is not None:
            pending.arrived.synchronize()
        if pending.num_groups:
            return verified_output(pending.results.step, pending.tokens, pending.num_groups)
        output = plain_output(pending.tokens.tolist(), pending.results)
        turn = pending.results.turn
        if turn is None:
            return output
        assert self._gates is not None
        return dataclasses.replace(output, kv_loads_timed_out=self._gates.take_error(turn))

    def _launch_drafted(
        self, step: SchedulerOutput, drafts: DraftBatch, num_rows: int
    ) -> LaunchedStep:
        drawn = step.request_slots[step.num_samples > 0]
        plain = (
            self.typical is None and not step.prompt_logprob_spans and self._sampler.is_plain(drawn)
        )
        is_tree = drafts.counts > 0
        num_samples = int(np.where(is_tree, step.num_scheduled_tokens, step.num_samples).sum())
        bucket = _bucket(self._graph_rows, num_rows) if self._graphs is not None else None
        short = self._context.is_short(step.num_computed_tokens + step.num_scheduled_tokens)
        if bucket is not None and num_samples <= bucket:
            assert self._graphs is not None
            key = ("short verify" if short else "verify", bucket)
            packet = self._captured[key]
            self._pack(step, packet)
            if not plain:
                self._packer.withdraw_trees(packet.layout)
            self._graphs.replay(key)
            hidden = self._hidden[:num_rows]
            launched = self._sent_by_graph(step, packet.layout.groups + packet.layout.samples)
        else:
            num_groups = int(np.where(is_tree, 1, step.num_samples).sum())
            tile = self._context.tree_tile(bucket or num_rows, short=short)
            layout = self._packets.exact(step, tile, num_samples, num_groups)
            packet = self._packets.packet(layout, tile, cut=not short)
            any_cut = self._pack(step, packet)
            inputs = self._packets.views(packet.layout)
            attention = StepAttention(self._context, inputs, tile, any_cut=any_cut)
            hidden = self._run_model(packet, inputs, attention)
            if plain:
                self._verify(inputs, hidden)
            launched = self._send_back(step, self._walked.packed[: num_groups + num_samples])
        launched.num_groups = packet.layout.groups
        if not plain:
            launched.drafted = self._drafted_step(step, drafts, hidden)
        return launched

    def _drafted_step(
        self, step: SchedulerOutput, drafts: DraftBatch, hidden: torch.Tensor
    ) -> DraftedStep:
        """Prepares draws by depth from `hidden`, [T, hidden], which stays as it is until then:
        nothing is launched ahead of a step with drafts."""
        trees = tree_tokens(step, drafts)
        size, places = self._cache.shape.block_size, trees.kv_indices
        blocks = self._packer.tables[
            np.repeat(step.request_slots, step.num_scheduled_tokens), places // size
        ]
        return drafted_step(
            self._model,
            hidden,
            step,
            trees=trees,
            slot_mapping=blocks * size + places % size,
            prompts=self._prompts,
        )

    def _launch_eager(self, step: SchedulerOutput, num_rows: int, plain: bool) -> LaunchedStep:
        single = len(step.request_slots) == num_rows
        library: tuple[LibraryRows, ...] = ()
        planned = None
        if not single:
            library, planned = self._library.plan(
                step.request_slots,
                step.num_computed_tokens,
                step.num_scheduled_tokens,
                self._packer.tables,
            )
        short = single and self._context.is_short(step.num_computed_tokens + 1)
        if single:  # as the graphs do
            tile = self._decode_tile(num_rows, short)
        else:
            tile = self._context.tile_for(num_rows, single=False)
        drawn = int(step.num_samples.sum())
        packet = self._packets.packet(
            self._packets.exact(step, tile, drawn, 0), tile, cut=not short
        )
        any_cut = self._pack(step, packet, planned)
        inputs = self._packets.views(packet.layout)
        attention: Attend = StepAttention(
            self._context,
            inputs,
            tile,
            any_cut=any_cut,
            library=library,
            planned=planned is None or bool(planned.any()),
        )
        if step.kv_loads:
            attention = self._gated(attention)
        hidden = self._run_model(packet, inputs, attention)
        if not plain:
            return self._draw_by_torch(step, hidden)
        if drawn:
            self._draw(inputs, hidden, drawn)
        return self._send_back(step, self._tokens[:drawn])

    def _admit(self, step: SchedulerOutput) -> None:
        for state in step.admitted:
            self._packer.sampling.admit(state)
            self._sampler.admit(state)
            if state.params.prompt_logprobs is not None:
                self._prompts[state.request_slot] = state
        if self._sampler.has_history:
            observe_inputs(self._sampler, step)
        self._packer.write_tables(step)
        copies = step.block_copies
        if copies.shape[1]:
            if step.kv_loads and self._gates is not None:
                self._gates.wait(self._cache.shape.num_layers - 1)  # one of them may be loading
            self._cache.copy_blocks(list(zip(*copies.tolist(), strict=True)))

    # -- its parts --------------------------------------------------------------------------

    def _pack(
        self, step: SchedulerOutput, packet: Packet, chosen: np.ndarray | None = None
    ) -> bool:
        """Plans and packs a step, for `_run_model`; whether attention is cut into pieces.

        Args:
            chosen: [S] bool, sequences that the work list covers; None: all.
        """
        writes = step.block_table_writes
        if writes.shape[1] > packet.layout.writes:  # a long prefix hit: more than a packet holds
            last = np.stack((writes[0], writes[1], self._packer.tables[writes[0], writes[1]]))
            slots, columns, blocks = self._uploads.send(last.astype(np.int32))
            self._tables[slots.long(), columns.long()] = blocks
        return self._packer.pack(step, packet.layout, packet.limits, chosen)

    def _decode_tile(self, bucket: int, short: bool) -> TileShape:
        if short:
            return self._context.short_tile(bucket)
        return self._context.tile_for(bucket, single=True)

    def _gated(self, attention: Attend) -> GatedAttention:
        assert self._gates is not None
        return GatedAttention(attention, self._gates)

    def _run_model(
        self, packet: Packet, inputs: StepInputs[torch.Tensor], attention: Attend
    ) -> torch.Tensor:
        """[T, hidden] after the final norm, of the step whose packet's turn it is."""
        fetch_packet(self._packer.ring, self._turns[:1], out=packet.target)
        input_ids = apply_step_inputs(
            inputs.token_ids,
            inputs.row_slots,
            self._last_tokens,
            self._tables,
            inputs.writes,
            inputs.num_writes,
            turn=self._turns[:1],
            ring_size=RING,
            out=self._input_ids[: len(inputs.token_ids)],
        )
        return self._model(input_ids, inputs.positions, attention)

    def _draw(self, inputs: StepInputs[torch.Tensor], hidden: torch.Tensor, count: int) -> None:
        """The first `count` sampled rows' tokens into `_tokens` and `_last_tokens`."""
        self._pick_from(inputs, hidden.index_select(0, inputs.sample_rows[:count]))

    def _pick_from(self, inputs: StepInputs[torch.Tensor], hidden: torch.Tensor) -> None:
        pick_tokens(
            self._model.logits(hidden),
            PickRows(inputs.pick[:, : len(hidden)]),
            self._pick,
            slots=inputs.sample_slots[: len(hidden)],
            last_tokens=self._last_tokens,
            out=self._tokens[: len(hidden)],
        )

    def _verify(self, inputs: StepInputs[torch.Tensor], hidden: torch.Tensor) -> None:
        """Draws after every row of every tree, walks the trees and closes the gaps in the KV."""
        tree = inputs.tree
        assert tree is not None
        rows = inputs.sample_rows
        drawn = pick_tokens(
            self._model.logits(hidden.index_select(0, rows)),
            PickRows(inputs.pick),
            self._pick,
            out=self._tokens[: len(rows)],
        )
        walked = self._walked.part(tree.groups.shape[1], len(rows))
        walk_trees(
            drawn,
            tree.draft_tokens,
            tree.parents,
            cache_rows=tree.cache_rows,
            groups=tree.groups,
            last_tokens=self._last_tokens,
            out=walked,
        )
        compact_kv(self._cache.data, walked.sources, walked.destinations, walked.counts)

    def _draw_by_torch(self, step: SchedulerOutput, hidden: torch.Tensor) -> LaunchedStep:
        """The draws and log-probabilities of a step that the kernels do not serve."""
        results = sample_step(
            self._model, hidden, step, self._sampler, self._last_tokens, self._prompts
        )
        results.prompt_logprobs = [
            (slot, rows.start_download()) for slot, rows in results.prompt_logprobs
        ]
        drawn = results.sampled
        if drawn is None:
            return self._send_back(step, self._tokens[:0], results)
        if drawn.logprobs is not None:
            drawn.logprobs = drawn.logprobs.start_download()
        return self._send_back(step, drawn.token_ids, results)

    def _draw_processed(
        self,
        logits: torch.Tensor,
        slots: np.ndarray,
        positions: np.ndarray,
        sample_indices: np.ndarray,
    ) -> torch.Tensor:
        """The torch sampler's draw: see `sampling.sampler.SampleProcessed`."""
        packed = np.take(self._packer.sampling.packed, slots, axis=1)
        packed[6], packed[7] = sample_indices, positions
        rows = PickRows(upload(packed, self._device))
        return pick_tokens(logits, rows, self._pick)

    def _send_back(
        self,
        step: SchedulerOutput,
        tokens: torch.Tensor,
        results: PendingStep | None = None,
    ) -> LaunchedStep:
        place, array, event = self._arrivals.take()
        count = len(tokens)
        place[:count].copy_(tokens, non_blocking=True)
        if event is not None:
            event.record()
        return LaunchedStep(results or PendingStep(step, None, []), array[:count], event)

    def _sent_by_graph(self, step: SchedulerOutput, count: int) -> LaunchedStep:
        _, array, event = self._sent.take()
        if event is not None:
            event.record()
        return LaunchedStep(PendingStep(step, None, []), array[:count], event)

    # -- capture ----------------------------------------------------------------------------

    @torch.inference_mode()
    def _capture(self, graphs: GraphSet[tuple[str, int]], drafts: bool) -> None:
        """Captures every bucket, the largest first so that smaller ones reuse its memory."""
        for bucket in reversed(self._decode_rows):
            self._capture_decode(graphs, bucket)
        for bucket in reversed(self._graph_rows):
            self._capture_rows(graphs, "rows", bucket)
        for bucket in reversed(self._gated_rows if self._gates is not None else ()):
            self._capture_rows(graphs, "gated rows", bucket)
        inputs = self._packets.views(self._packets.rows(self._graph_rows[-1]))
        for bucket in reversed(self._decode_rows):
            self._capture_head(graphs, bucket, inputs)
        for bucket in reversed(self._graph_rows if drafts else ()):
            self._capture_verify(graphs, bucket)
        if drafts:
            verify = [(bucket, ("verify", bucket)) for bucket in self._graph_rows if bucket > 1]
            self.profile = profile_graphs(graphs, [(1, ("decode", 1)), *verify])
        self._turns.zero_()  # every body ran without a packet
        torch.cuda.synchronize()

    def _capture_decode(self, graphs: GraphSet[tuple[str, int]], bucket: int) -> None:
        layout = self._packets.decode(bucket)
        inputs = self._packets.views(layout)
        for name, short in (("decode", False), ("short decode", True)):
            tile = self._decode_tile(bucket, short)
            packet = self._packets.packet(layout, tile, cut=not short)
            self._captured[name, bucket] = packet
            attention = StepAttention(self._context, inputs, tile, any_cut=not short)

            def body(packet: Packet = packet, attention: StepAttention = attention) -> None:
                self._pick_from(inputs, self._run_model(packet, inputs, attention))
                send_results(self._tokens[:bucket], self._turns[1:], ring=self._sent.ring)

            graphs.capture((name, bucket), body)

    def _capture_rows(self, graphs: GraphSet[tuple[str, int]], name: str, bucket: int) -> None:
        layout = self._packets.rows(bucket)
        inputs = self._packets.views(layout)
        tile = self._context.tile_for(bucket, single=False)
        packet = self._captured[name, bucket] = self._packets.packet(layout, tile)
        attention: Attend = StepAttention(self._context, inputs, tile, any_cut=True)
        if name == "gated rows":
            attention = self._gated(attention)

        def body() -> None:
            self._hidden[:bucket].copy_(self._run_model(packet, inputs, attention))

        graphs.capture((name, bucket), body)

    def _capture_head(
        self, graphs: GraphSet[tuple[str, int]], bucket: int, inputs: StepInputs[torch.Tensor]
    ) -> None:
        def body() -> None:
            self._draw(inputs, self._hidden, bucket)

        graphs.capture(("head", bucket), body)

    def _capture_verify(self, graphs: GraphSet[tuple[str, int]], bucket: int) -> None:
        layout = self._packets.verify(bucket)
        inputs = self._packets.views(layout)
        results = self._walked.packed[: layout.groups + layout.samples]
        for name, short in (("verify", False), ("short verify", True)):
            tile = self._context.tree_tile(bucket, short=short)
            packet = self._packets.packet(layout, tile, cut=not short)
            self._captured[name, bucket] = packet
            attention = StepAttention(self._context, inputs, tile, any_cut=not short)

            def body(packet: Packet = packet, attention: StepAttention = attention) -> None:
                hidden = self._run_model(packet, inputs, attention)
                self._hidden[:bucket].copy_(hidden)  # for draws by depth
                self._verify(inputs, hidden)
                send_results(results, self._turns[1:], ring=self._sent.ring)

            graphs.capture((name, bucket), body)


def _bucket(buckets: tuple[int, ...], count: int) -> int | None:
    """The smallest bucket that holds `count`."""
    return next((bucket for bucket in buckets if bucket >= count), None)
