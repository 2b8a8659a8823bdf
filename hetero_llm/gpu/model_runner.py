"""Runs steps on a CUDA device: one upload, one graph, one small download.

Steps of at most 512 rows replay captured graphs: "decode" where every sequence has one row and
draws one token (model, head and draw in one graph), else "rows" (the model) and then "head" (the
draw) by their own buckets. Larger steps, and with `enforce_eager` all steps, run the same functions
uncaptured. Draws that need more than temperature and thresholds (log-probabilities, penalties,
users' processors) go through the torch sampler after a "rows" graph.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch

from hetero_llm.core.step import ModelRunnerOutput, SchedulerOutput, SlotState
from hetero_llm.gpu.graphs import MAX_GRAPH_ROWS, GraphSet, row_buckets
from hetero_llm.gpu.kernels.paged_attention import TileShape
from hetero_llm.gpu.kernels.pick import PickRows, make_pick_workspace, pick_tokens
from hetero_llm.gpu.kernels.step_inputs import apply_step_inputs
from hetero_llm.gpu.library_attention import available
from hetero_llm.gpu.paged_attention import (
    AttentionContext,
    LongChunk,
    StepAttention,
    check_supported,
    find_long_chunks,
)
from hetero_llm.gpu.step_inputs import (
    PacketLayout,
    StepInputs,
    StepPacker,
    StepShape,
    packet_views,
    shape_step,
)
from hetero_llm.models.config import ModelConfig
from hetero_llm.models.layers import CausalLM
from hetero_llm.runner.kv_cache import PagedKVCache
from hetero_llm.runner.model_runner import (
    PendingStep,
    observe_inputs,
    plain_output,
    prompt_row_logprobs,
)
from hetero_llm.sampling.sampler import Sampler

_LIBRARY_ROWS = 256
"""Chunks of at least so many rows of an uncaptured step are attended through the library."""
_EAGER_WRITES = 4096
_ARRIVALS = 4


@dataclass(slots=True)
class LaunchedStep:
    """A launched step: its tokens arrive in `tokens` (pinned) once `arrived` has happened."""

    results: PendingStep
    tokens: torch.Tensor
    arrived: torch.cuda.Event | None


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
    ) -> None:
        check_supported(config, cache.shape.dtype)
        device = cache.data.device
        parameter = next(model.parameters())
        self._model = model
        self._cache = cache
        self._device = device
        columns = -(-max_model_len // cache.shape.block_size)
        self._tables = torch.zeros(max_num_seqs, columns, dtype=torch.int32, device=device)
        self._last_tokens = torch.zeros(max_num_seqs, dtype=torch.int64, device=device)
        self._context = AttentionContext(config, cache, self._tables, parameter.dtype)
        self._library = available(
            parameter.dtype, config.num_heads, config.num_kv_heads, config.head_dim, device
        )
        self._graph_rows = row_buckets(min(MAX_GRAPH_ROWS, max_num_batched_tokens))
        self._decode_rows = row_buckets(min(MAX_GRAPH_ROWS, max_num_seqs))
        largest = self._layout(max_num_batched_tokens, max_num_seqs, _EAGER_WRITES)
        captured = self._rows_layout(self._graph_rows[-1])
        pin = device.type == "cuda"  # else Triton's interpreter: for tests
        words = max(largest.words, captured.words)
        self._packer = StepPacker(
            words,
            max_num_seqs=max_num_seqs,
            columns=columns,
            block_size=cache.shape.block_size,
            vocab_size=config.vocab_size,
            pin=pin,
        )
        self._packet = torch.zeros(words, dtype=torch.int32, device=device)
        self._input_ids = torch.zeros(max_num_batched_tokens, dtype=torch.int32, device=device)
        most_drawn = max(max_num_seqs, self._graph_rows[-1])
        self._tokens = torch.zeros(most_drawn, dtype=torch.int64, device=device)
        self._arrivals = [
            torch.zeros(most_drawn, dtype=torch.int64, pin_memory=pin) for _ in range(_ARRIVALS)
        ]
        self._next_arrival = 0
        self._pick = make_pick_workspace(most_drawn, config.vocab_size, device)
        self._hidden = torch.zeros(
            self._graph_rows[-1], config.hidden_size, dtype=parameter.dtype, device=device
        )
        self._sampler = Sampler(max_num_seqs, config.vocab_size, device)
        self._prompts: dict[int, SlotState] = {}  # of slots that want prompt_logprobs
        self._graphs: GraphSet[tuple[str, int]] | None = None
        if graphs:
            self._graphs = GraphSet()
            self._capture(self._graphs)

    # -- a step -----------------------------------------------------------------------------

    @torch.inference_mode()
    def launch(self, step: SchedulerOutput) -> LaunchedStep:
        """Issues all device work of a step."""
        self._admit(step)
        num_rows = int(step.counts.sum())
        plain = not step.prompt_rows and self._sampler.is_plain(step.slots)
        graphs = self._graphs
        if graphs is None or num_rows > self._graph_rows[-1]:
            return self._launch_eager(step, num_rows, plain)
        single = len(step.slots) == num_rows
        if single and plain and bool((step.num_samples == 1).all()):
            bucket = _bucket(self._decode_rows, num_rows)
            if bucket is not None:
                cut = self._upload(step, self._layout(bucket, bucket, None), single=True)
                graphs.replay(("decode cut" if cut else "decode", bucket))
                return self._send_back(step, num_rows)
        bucket = _bucket(self._graph_rows, num_rows)
        assert bucket is not None
        self._upload(step, self._rows_layout(bucket), single=False)
        graphs.replay(("rows", bucket))
        if not plain:
            return self._draw_by_torch(step, self._hidden[:num_rows])
        drawn = int(step.num_samples.sum())
        if drawn:
            heads = _bucket(self._decode_rows, drawn)
            assert heads is not None, "more draws than slots"
            graphs.replay(("head", heads))
        return self._send_back(step, drawn)

    def finish(self, pending: LaunchedStep) -> ModelRunnerOutput:
        """Waits for a launched step and returns its results as plain data."""
        if pending.arrived is not None:
            pending.arrived.synchronize()
        return plain_output(pending.tokens.tolist(), pending.results)

    def _launch_eager(self, step: SchedulerOutput, num_rows: int, plain: bool) -> LaunchedStep:
        single = len(step.slots) == num_rows
        long_chunks: tuple[LongChunk, ...] = ()
        planned = None
        if self._library and num_rows >= _LIBRARY_ROWS:
            counts = step.counts
            long_chunks, planned = find_long_chunks(
                self._context,
                step.starts,
                counts,
                np.cumsum(counts) - counts,
                self._packer.tables[step.slots],
                min_rows=_LIBRARY_ROWS,
            )
        tile = self._context.tile_for(num_rows, single)
        shape = shape_step(step, self._context.windows, self._context.limits(tile), planned)
        layout = PacketLayout(
            num_rows,
            shape.num_samples,
            max(len(items) for items in shape.items),
            max(len(cut) for cut in shape.cut_rows),
            min(step.table_writes.shape[1], _EAGER_WRITES),
            len(shape.items),
        )
        inputs = self._upload_packed(step, shape, layout)
        attention = StepAttention(
            self._context,
            inputs,
            tile,
            any_cut=shape.any_cut,
            long_chunks=long_chunks,
            planned=planned is None or bool(planned.any()),
        )
        hidden = self._run_model(inputs, attention)
        if not plain:
            return self._draw_by_torch(step, hidden)
        if shape.num_samples:
            self._draw(inputs, hidden, shape.num_samples)
        return self._send_back(step, shape.num_samples)

    def _admit(self, step: SchedulerOutput) -> None:
        for state in step.admitted:
            self._packer.sampling.admit(state)
            self._sampler.admit(state)
            if state.params.prompt_logprobs is not None:
                self._prompts[state.slot] = state
        if self._sampler.has_history:
            observe_inputs(self._sampler, step)
        self._packer.write_tables(step)
        copies = step.block_copies
        if copies.shape[1]:
            self._cache.copy_blocks(list(zip(*copies.tolist(), strict=True)))

    # -- its parts --------------------------------------------------------------------------

    def _layout(self, rows: int, samples: int, writes: int | None) -> PacketLayout:
        """Of a bucket, with room for any step of so many rows."""
        tiles = [self._context.tile_for(rows, single) for single in (True, False)]
        pieces = max(self._context.limits(tile).max_pieces for tile in tiles)
        return PacketLayout(
            rows,
            samples,
            rows + pieces,
            rows,
            max(256, 2 * rows) if writes is None else writes,
            len(self._context.windows),
        )

    def _rows_layout(self, bucket: int) -> PacketLayout:
        """Of a "rows" graph: the part that "head" graphs read lies at the same place in all."""
        return self._layout(bucket, self._decode_rows[-1], None)

    def _upload(self, step: SchedulerOutput, layout: PacketLayout, *, single: bool) -> bool:
        """Plans, packs and uploads a step for a graph; whether attention is cut into pieces."""
        limits = self._context.limits(self._context.tile_for(layout.rows, single))
        shape = shape_step(step, self._context.windows, limits)
        self._upload_packed(step, shape, layout)
        return shape.any_cut

    def _upload_packed(
        self, step: SchedulerOutput, shape: StepShape, layout: PacketLayout
    ) -> StepInputs[torch.Tensor]:
        writes = step.table_writes
        if writes.shape[1] > layout.writes:  # a long prefix hit: more than a packet holds
            slots, columns, blocks = torch.from_numpy(writes).to(self._device)
            self._tables[slots.long(), columns.long()] = blocks
        packet = self._packer.pack(step, shape, layout)
        self._packet[: layout.words].copy_(packet, non_blocking=True)
        return packet_views(self._packet, layout)

    def _run_model(
        self, inputs: StepInputs[torch.Tensor], attention: StepAttention
    ) -> torch.Tensor:
        """[T, hidden] after the final norm."""
        input_ids = apply_step_inputs(
            inputs.token_ids,
            inputs.row_slots,
            self._last_tokens,
            self._tables,
            inputs.writes,
            inputs.num_writes,
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

    def _draw_by_torch(self, step: SchedulerOutput, hidden: torch.Tensor) -> LaunchedStep:
        """The draws and log-probabilities of a step that the kernels do not serve."""
        slots = step.slots
        prompt_logprobs = [
            (
                int(slots[rows.index]),
                prompt_row_logprobs(
                    self._model, hidden, step, rows, self._prompts[int(slots[rows.index])]
                ),
            )
            for rows in step.prompt_rows
        ]
        sampled = np.flatnonzero(step.num_samples)
        if len(sampled) == 0:
            return self._send_back(step, 0, PendingStep(step, None, prompt_logprobs))
        last = (np.cumsum(step.counts) - 1)[sampled]
        drawn = self._sampler.sample(
            self._model.logits(hidden[torch.from_numpy(last).to(self._device)]),
            slots[sampled],
            (step.starts + step.counts)[sampled],
            step.num_samples[sampled],
        )
        # Of several draws of a slot any may stay: the sequence forks before it goes on.
        owners = np.repeat(slots[sampled], step.num_samples[sampled]).astype(np.int64)
        self._last_tokens[torch.from_numpy(owners).to(self._device)] = drawn.token_ids
        count = len(drawn.token_ids)
        self._tokens[:count] = drawn.token_ids
        return self._send_back(step, count, PendingStep(step, drawn, prompt_logprobs))

    def _send_back(
        self, step: SchedulerOutput, count: int, results: PendingStep | None = None
    ) -> LaunchedStep:
        arrival = self._arrivals[self._next_arrival][:count]
        self._next_arrival = (self._next_arrival + 1) % len(self._arrivals)
        arrival.copy_(self._tokens[:count], non_blocking=True)
        event = None
        if self._device.type == "cuda":
            event = torch.cuda.Event()
            event.record()
        return LaunchedStep(results or PendingStep(step, None, []), arrival, event)

    # -- capture ----------------------------------------------------------------------------

    @torch.inference_mode()
    def _capture(self, graphs: GraphSet[tuple[str, int]]) -> None:
        """Captures every bucket, the largest first so that smaller ones reuse its memory."""
        for bucket in reversed(self._decode_rows):
            inputs = packet_views(self._packet, self._layout(bucket, bucket, None))
            tile = self._context.tile_for(bucket, single=True)
            self._capture_decode(graphs, bucket, inputs, tile)
        for bucket in reversed(self._graph_rows):
            inputs = packet_views(self._packet, self._rows_layout(bucket))
            tile = self._context.tile_for(bucket, single=False)
            self._capture_rows(graphs, bucket, inputs, tile)
        inputs = packet_views(self._packet, self._rows_layout(self._graph_rows[-1]))
        for bucket in reversed(self._decode_rows):
            self._capture_head(graphs, bucket, inputs)
        torch.cuda.synchronize()

    def _capture_decode(
        self,
        graphs: GraphSet[tuple[str, int]],
        bucket: int,
        inputs: StepInputs[torch.Tensor],
        tile: TileShape,
    ) -> None:
        for name, any_cut in (("decode cut", True), ("decode", False)):
            attention = StepAttention(self._context, inputs, tile, any_cut=any_cut)

            def body(attention: StepAttention = attention) -> None:
                self._pick_from(inputs, self._run_model(inputs, attention))

            graphs.capture((name, bucket), body)

    def _capture_rows(
        self,
        graphs: GraphSet[tuple[str, int]],
        bucket: int,
        inputs: StepInputs[torch.Tensor],
        tile: TileShape,
    ) -> None:
        attention = StepAttention(self._context, inputs, tile, any_cut=True)

        def body() -> None:
            self._hidden[:bucket].copy_(self._run_model(inputs, attention))

        graphs.capture(("rows", bucket), body)

    def _capture_head(
        self, graphs: GraphSet[tuple[str, int]], bucket: int, inputs: StepInputs[torch.Tensor]
    ) -> None:
        def body() -> None:
            self._draw(inputs, self._hidden, bucket)

        graphs.capture(("head", bucket), body)


def _bucket(buckets: tuple[int, ...], count: int) -> int | None:
    """The smallest bucket that holds `count`."""
    return next((bucket for bucket in buckets if bucket >= count), None)
