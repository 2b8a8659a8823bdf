"""CUDA graphs of steps: which are captured, which one a step replays, and what is not captured.

Steps of at most 512 tokens replay graphs. A graph holds a number of tokens (its bucket), and a step
is padded to the smallest bucket that holds it:

- "decode": every sequence has one token and samples once; model, head, sampling and results.
- "model" and then "head", each by its own bucket: any other step without draft trees. A step whose
  sampling needs more than the kernels do (log-probabilities, penalties, users' processors) replays
  "model" alone, and the torch sampler follows.
- "verify": steps with draft trees; model, head, sampling, verification and results.
- "short decode", "short verify": the same for contexts that need no attention tile cut.
- Where LoRA adapters are served, each of these but "head" once more, "... with adapters", for
  steps in which a sequence has one.
- "waiting model": as "model", for steps that read KV still on its way from host memory. Attention
  waits for each layer on the device. "waiting model with adapters" waits for KV and for adapters,
  "waiting verify with adapters" for adapters (a step that reads such KV has no drafts). No other
  graph waits, so a step that has to wait does not replay "decode".

With several GPUs the host launches the kernels of up to some 3,000 tokens, sums included, for
longer than they run (40 ms for 1,024 tokens, which take less than 15), so there "model" is captured
up to 2,048 tokens, too. Contexts beyond 4,096 keys are left to the library's attention, which is
faster and not captured.

Larger steps, and with `enforce_eager` all steps, issue the same kernels uncaptured.
"""

from __future__ import annotations

import functools
import gc
import logging
from bisect import bisect_left
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Generic, NamedTuple, TypeVar

import numpy as np
import torch

from hetero_llm.core.step import SchedulerOutput
from hetero_llm.gpu.adapters import AdapterUse
from hetero_llm.gpu.attention_context import AttentionContext
from hetero_llm.gpu.compile_ahead import compile_ahead, log_compiled
from hetero_llm.gpu.device_step import DeviceStep
from hetero_llm.gpu.fill_step import StepFiller
from hetero_llm.gpu.kernels.launch import num_multiprocessors
from hetero_llm.gpu.paged_attention import StepAttention
from hetero_llm.gpu.step_buffer import DeviceStepBuffers, StepBuffer, StepLayout
from hetero_llm.models.layers import Attend
from hetero_llm.runner.layer_ready import LayerReadyAttention, LayerReadyFlags

logger = logging.getLogger(__name__)

K = TypeVar("K")
GraphKey = tuple[str, int]
"""Kind and bucket of a step's graph."""

MAX_GRAPH_TOKENS = 512
_PROMPT_BUCKETS = (640, 768, 896, 1024, 1280, 1536, 1792, 2048)
_PROMPT_CONTEXT = 4096
_FORCED_BUCKETS = (2, 8, 16, 32, 64, 128)
_SHORT_CONTEXT = 384
_WAITING = "waiting "
_WITH_ADAPTERS = "{} with adapters"
_REPLAYS = 3


class StepBuckets(NamedTuple):
    """Numbers of tokens that are captured, ascending.

    Attributes:
        tokens: of "model" graphs.
        verify: of "verify" graphs; none where no step has draft trees.
        decode: of "decode" and "head" graphs, in which it is the number of sampled tokens.
        waiting: of "waiting ..." graphs.
        prompts: of "model" graphs of more tokens; none where launches take no longer than kernels.
    """

    tokens: tuple[int, ...]
    verify: tuple[int, ...]
    decode: tuple[int, ...]
    waiting: tuple[int, ...]
    prompts: tuple[int, ...]

    @property
    def most_tokens(self) -> int:
        """Of a captured step."""
        return (*self.tokens, *self.prompts)[-1]


class DraftedSizes(NamedTuple):
    """Of a step with draft trees.

    Attributes:
        num_tokens: draft nodes included.
        num_samples: tokens to sample: one after each token of a tree, and those of the others.
        num_groups: of samples that are verified together: a tree, or one sample.
        longest, num_keys: keys of the longest context, and of all; the step's own included.
    """

    num_tokens: int
    num_samples: int
    num_groups: int
    longest: int
    num_keys: int


def step_buckets(
    max_num_seqs: int, max_tokens: int, *, most_drafted_tokens: int = 0, prompts: bool = False
) -> StepBuckets:
    """The buckets of a runner whose steps have at most `max_tokens` tokens.

    Args:
        most_drafted_tokens: most tokens of a step with draft trees; 0: there are no such steps.
        prompts: steps of more than `MAX_GRAPH_TOKENS` tokens are captured, too.
    """
    tokens = token_buckets(min(MAX_GRAPH_TOKENS, max_tokens))
    decode = token_buckets(min(MAX_GRAPH_TOKENS, max_num_seqs))
    verify = tokens
    if most_drafted_tokens < min(max_tokens, tokens[-1]):  # forced tokens: a few sizes serve them
        verify = tuple(b for b in tokens if b in _FORCED_BUCKETS and b <= most_drafted_tokens)
    larger: tuple[int, ...] = ()
    if prompts and max_tokens > MAX_GRAPH_TOKENS:
        larger = _up_to(_PROMPT_BUCKETS, max_tokens)
    return StepBuckets(tokens, verify, decode, waiting_buckets(tokens), larger)


def token_buckets(limit: int) -> tuple[int, ...]:
    """Numbers of tokens, ascending: padding wastes at most a quarter from 64 tokens on. 448 is left
    out: cuBLAS computes 512 rows of a 7B or 8B shape in 9.8 ms, 448 in 13.8.

    Args:
        limit: most tokens of a step; the last bucket holds it (or is `MAX_GRAPH_TOKENS`).
    """
    buckets = [1, 2, 4, *range(8, 65, 8), *range(80, 129, 16), *range(160, 257, 32)]
    buckets += [320, 384, MAX_GRAPH_TOKENS]
    return _up_to(buckets, limit)


def _up_to(buckets: Sequence[int], limit: int) -> tuple[int, ...]:
    """The buckets below `limit` and the first one that holds it, if one does."""
    return tuple(buckets[: bisect_left(buckets, limit) + 1])


def waiting_buckets(buckets: tuple[int, ...]) -> tuple[int, ...]:
    """Those of `buckets` that steps with unfinished loads use, of KV or of adapters. Up to 128
    tokens a step takes about as long as reading the weights, and seldom less than its load, so a
    few sizes serve there. The larger ones are all kept, where padding would cost time, and so is
    the last."""
    few = (8, 32, 64, 128)
    return tuple(b for b in buckets if b in few or b > few[-1] or b == buckets[-1])


def is_short(contexts: np.ndarray, context: AttentionContext) -> bool:
    """Whether a step without prompt chunks needs no attention tile cut.

    Args:
        contexts: [S] keys of each sequence, the step's own included.
    """
    return are_short(len(contexts), int(contexts.max()), int(contexts.sum()), context)


def are_short(count: int, longest: int, total: int, context: AttentionContext) -> bool:
    """As `is_short`, for `count` sequences: the most keys of one and the keys of all."""
    if longest <= _SHORT_CONTEXT:
        return True
    places = 3 * num_multiprocessors(context.block_tables.device)
    fills_device = count * context.config.num_kv_heads >= places
    return fills_device and longest * count <= 2 * total


@contextmanager
def _no_collection() -> Iterator[None]:
    """Graphs of an earlier engine must not be destroyed while a stream is captured."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


@functools.cache
def _capture_stream(device: int) -> torch.cuda.Stream:
    """One for all sets of a device: cuBLAS keeps 32 MiB for each stream that it was used on."""
    return torch.cuda.Stream(device)


class GraphSet(Generic[K]):
    """Graphs by key, in one memory pool: only one of them runs at a time."""

    def __init__(self) -> None:
        self._graphs: dict[K, torch.cuda.CUDAGraph] = {}
        self._pool = torch.cuda.graph_pool_handle()
        self._stream = _capture_stream(torch.cuda.current_device())

    def capture(self, key: K, body: Callable[[], None]) -> None:
        """Runs `body` once so that its kernels are compiled and loaded, then captures it.

        `body` must read its inputs from tensors that live on and leave its results in such. Other
        threads may use the device meanwhile: host memory may still be being pinned.
        """
        self._stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._stream):
            body()
        torch.cuda.current_stream().wait_stream(self._stream)
        graph = torch.cuda.CUDAGraph()
        with (
            _no_collection(),
            torch.cuda.graph(
                graph, pool=self._pool, stream=self._stream, capture_error_mode="thread_local"
            ),
        ):
            body()
        self._graphs[key] = graph

    def replay(self, key: K) -> None:
        self._graphs[key].replay()

    def __contains__(self, key: K) -> bool:
        return key in self._graphs

    def __len__(self) -> int:
        return len(self._graphs)


def replay_seconds(graphs: GraphSet[K], keys: Sequence[K]) -> list[float]:
    """Seconds of each graph, with whatever is in its inputs. Waits for the device."""
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    seconds = []
    for key in keys:
        graphs.replay(key)  # the first replay loads the graph
        times = []
        for _ in range(_REPLAYS):
            begin.record()
            graphs.replay(key)
            end.record()
            end.synchronize()
            times.append(begin.elapsed_time(end) * 1e-3)
        seconds.append(min(times))  # one of two once took twice its time
    return seconds


class StepGraphs:
    """The graphs of a runner's steps.

    Args:
        captured: an empty set for them.
        layer_ready: what steps with loads wait at; None: there are no such steps.
        adapters: there will be steps with adapters.
        adapter_loads: some of them wait for their adapters (`GpuAdapters.overlaps_loads`).

    Attributes:
        captured: the graphs by kind and bucket; none before `capture`.
        profile: (tokens, seconds) of verify graphs and of one decoded token, ascending; empty
            without a drafter. Measured without any context: attention over long contexts adds to
            it, which the times of real steps show.
    """

    def __init__(
        self,
        captured: GraphSet[GraphKey],
        device_step: DeviceStep,
        filler: StepFiller,
        buffers: DeviceStepBuffers,
        context: AttentionContext,
        *,
        buckets: StepBuckets,
        layer_ready: LayerReadyFlags | None,
        adapters: bool,
        adapter_loads: bool,
    ) -> None:
        self.captured = captured
        self.profile: list[tuple[int, float]] = []
        self._device_step = device_step
        self._filler = filler
        self._buffers = buffers
        self._context = context
        self._buckets = buckets
        waiting = (b for b in buckets.waiting if buckets.verify and b <= buckets.verify[-1])
        self._waiting_verify = tuple(waiting) if adapter_loads else ()
        self._adapters = adapters
        self._adapter_loads = adapter_loads
        self._filled: dict[GraphKey, StepBuffer] = {}
        self._bodies: list[tuple[GraphKey, Callable[[], None]]] = []  # not captured yet
        self._plan(layer_ready)

    @property
    def bodies(self) -> list[Callable[[], None]]:
        """What is to be captured, for `compile_ahead`: those first that have most of the kernels.
        Products and tiles change at powers of two."""
        ordered = sorted(self._bodies, key=lambda item: item[0][1].bit_count() > 1)
        return [body for _, body in ordered]

    def replay_step(
        self, step: SchedulerOutput, num_tokens: int, *, plain: bool, adapted: AdapterUse
    ) -> str | None:
        """Fills the buffer of a step without drafts and replays its graphs.

        Args:
            plain: the kernels can sample for all of its sequences.
            adapted: of the step.

        Returns:
            None if no graph holds the step, else the kind replayed last, which says what there is:
            "decode": results that the graph has sent; "head": `DeviceStep.tokens`; "model":
            `DeviceStep.hidden` alone.
        """
        buckets = self._buckets
        num_samples = int(step.num_samples.sum())
        waits = bool(step.kv_loads) or adapted is AdapterUse.LOADING
        if num_tokens > buckets.tokens[-1] and (waits or not self._holds_prompts(step, num_tokens)):
            return None
        if num_samples > buckets.decode[-1]:
            return None
        single = len(step.request_slots) == num_tokens
        if single and plain and not waits and bool((step.num_samples == 1).all()):
            bucket = _smallest(buckets.decode, num_tokens)
            if bucket is not None:
                short = is_short(step.num_computed_tokens + 1, self._context)
                key = ("short decode" if short else "decode", bucket)
                self._fill_and_replay(step, key, adapted=adapted)
                return "decode"
        kind = "waiting model" if waits else "model"
        held = buckets.waiting if waits else (*buckets.tokens, *buckets.prompts)
        bucket = _smallest(held, num_tokens)
        assert bucket is not None
        self._fill_and_replay(step, (kind, bucket), adapted=adapted)
        if not plain:
            return "model"
        if num_samples and self._device_step.samples:
            head = _smallest(buckets.decode, num_samples)
            assert head is not None
            self.captured.replay(("head", head))
        return "head"

    def _holds_prompts(self, step: SchedulerOutput, num_tokens: int) -> bool:
        """Whether a graph for prompts serves this step of more than `MAX_GRAPH_TOKENS` tokens."""
        longest = int((step.num_computed_tokens + step.num_scheduled_tokens).max())
        return num_tokens <= self._buckets.most_tokens and longest <= _PROMPT_CONTEXT

    def replay_verify(
        self, step: SchedulerOutput, sizes: DraftedSizes, *, plain: bool, adapted: AdapterUse
    ) -> StepLayout | None:
        """Fills the buffer of a step with drafts and replays its graph, which sends the results.

        Args:
            sizes: of the step.
            plain: else the graph runs the model, but verifies no tree.
            adapted: of the step.

        Returns:
            The buffer's layout; None if no graph holds the step.
        """
        waits = adapted is AdapterUse.LOADING
        buckets = self._waiting_verify if waits else self._buckets.verify
        bucket = _smallest(buckets, sizes.num_tokens)
        if bucket is None or sizes.num_samples > bucket:
            return None
        count = len(step.request_slots)
        short = are_short(count, sizes.longest, sizes.num_keys, self._context)
        key = ("short verify" if short else "verify", bucket)
        if waits:
            key = ("waiting verify", bucket)
        self._fill_and_replay(step, key, adapted=adapted, withdraw=not plain)
        return self._filled[key].layout

    def _fill_and_replay(
        self, step: SchedulerOutput, key: GraphKey, *, adapted: AdapterUse, withdraw: bool = False
    ) -> None:
        buffer = self._filled[key]
        self._filler.fill(step, buffer)
        if withdraw:
            self._filler.withdraw_trees(buffer.layout)
        kind, bucket = key
        self.captured.replay((_WITH_ADAPTERS.format(kind), bucket) if adapted else key)

    @torch.inference_mode()
    def _plan(self, layer_ready: LayerReadyFlags | None) -> None:
        """Prepares the body of every bucket, the largest first so that smaller ones reuse its
        memory."""
        buckets = self._buckets
        for bucket in reversed(buckets.decode):
            for kind, short in (("decode", False), ("short decode", True)):
                tile = self._context.decode_tile(bucket, short=short)
                buffer = self._buffers.decode(bucket, tile, cut=not short)
                attention = StepAttention(self._context, buffer.inputs, tile, any_cut=not short)
                self._add_step((kind, bucket), buffer, attention, self._device_step.decode)
        for bucket in reversed((*buckets.tokens, *buckets.prompts)):
            self._add_model("model", bucket, None)
        waiting = reversed(buckets.waiting)
        for bucket in waiting if layer_ready is not None or self._adapter_loads else ():
            self._add_model("waiting model", bucket, layer_ready)
        inputs = self._filled["model", buckets.tokens[-1]].inputs  # whose part is the same in all
        hidden = self._device_step.hidden
        for bucket in reversed(buckets.decode if self._device_step.samples else ()):
            body = partial(self._device_step.sample, inputs, hidden, bucket)
            self._bodies.append((("head", bucket), body))
        for bucket in reversed(buckets.verify):
            self._add_verify("verify", bucket, short=False)
            self._add_verify("short verify", bucket, short=True)
        for bucket in reversed(self._waiting_verify):
            self._add_verify("waiting verify", bucket, short=False)

    @torch.inference_mode()
    def capture(self) -> None:
        """Captures all, which takes seconds."""
        log_compiled(compile_ahead(self.bodies))
        for key, body in self._bodies:
            self.captured.capture(key, body)
        self._bodies.clear()
        buckets = self._buckets
        if buckets.verify == buckets.tokens:
            keys = [("decode", 1), *(("verify", b) for b in buckets.verify if b > 1)]
            seconds = replay_seconds(self.captured, keys)
            self.profile = [(n, s) for (_, n), s in zip(keys, seconds, strict=True)]
        self._device_step.reset_turns()
        torch.cuda.synchronize()

    def _add_model(self, kind: str, bucket: int, layer_ready: LayerReadyFlags | None) -> None:
        tile = self._context.chunk_tile(bucket)
        buffer = self._buffers.model(bucket, tile)
        attention: Attend = StepAttention(self._context, buffer.inputs, tile, any_cut=True)
        if layer_ready is not None:
            attention = LayerReadyAttention(attention, layer_ready)
        self._add_step((kind, bucket), buffer, attention, self._device_step.model)

    def _add_verify(self, kind: str, bucket: int, *, short: bool) -> None:
        tile = self._context.tree_tile(bucket, short=short)
        buffer = self._buffers.verify(bucket, tile, cut=not short)
        attention = StepAttention(self._context, buffer.inputs, tile, any_cut=not short)
        layout = buffer.layout
        verified = self._device_step.verified.part(layout.groups, layout.samples)
        body = partial(self._device_step.verify, verified=verified)
        self._add_step((kind, bucket), buffer, attention, body)

    def _add_step(
        self,
        key: GraphKey,
        buffer: StepBuffer,
        attention: Attend,
        body: Callable[..., None],
    ) -> None:
        """`body`: of `DeviceStep`."""
        self._filled[key] = buffer
        kind, bucket = key
        waits = kind.startswith(_WAITING)
        if not waits or isinstance(attention, LayerReadyAttention):
            plain = partial(body, buffer, attention, adapted=AdapterUse.NONE)
            self._bodies.append((key, plain))
        if self._adapters:
            loads = waits and self._adapter_loads
            use = AdapterUse.LOADING if loads else AdapterUse.RESIDENT
            adapted = partial(body, buffer, attention, adapted=use)
            self._bodies.append(((_WITH_ADAPTERS.format(kind), bucket), adapted))


def _smallest(buckets: tuple[int, ...], count: int) -> int | None:
    """The smallest bucket that holds `count`."""
    at = bisect_left(buckets, count)
    return buckets[at] if at < len(buckets) else None


@torch.inference_mode()
def why_not_captured(body: Callable[[], None]) -> str | None:
    """Why the current device cannot capture `body`; None if it can.

    A capture in which the host waits for the device breaks off in a state that is hard to leave,
    so waiting is looked for before anything is captured. `body` must have no lasting effect: it
    runs a few times.

    Raises:
        OutOfMemoryError: of torch.
    """
    body()  # compiles kernels and fills tables, both of which may wait
    torch.cuda.synchronize()
    mode = torch.cuda.get_sync_debug_mode()
    try:
        torch.cuda.set_sync_debug_mode("error")
        try:
            body()
        finally:
            torch.cuda.set_sync_debug_mode(mode)
        GraphSet[str]().capture("trial", body)
    except torch.OutOfMemoryError:
        raise
    except RuntimeError as error:
        return " ".join(str(error).split())[:200]
    return None
