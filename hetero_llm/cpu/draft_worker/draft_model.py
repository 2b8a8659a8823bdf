"""The draft model of the CPU draft worker: candidates after committed prefixes and tree nodes.

    model = DraftModel.load(folder, sizes, dtype=torch.bfloat16, weight_format="int8", threads=8)
    layout = model.kv_layout
    layout.open(slot, prompt)
    found = model.step(layout.plan_prefix(256), pool.choose(seconds).nodes)
    layout.append(slot, committed)
    layout.keep(slots, moves)                                # moves of `TreePool.commit`

A step runs pending committed tokens of some sequences and tree nodes of others; a sequence's nodes
can run once none of its committed tokens is pending. A `TreePool` takes the candidates found.
`slot` is a request slot. One thread at a time.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass, replace
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch

from hetero_llm.core.errors import ConfigError, ModelLoadError
from hetero_llm.cpu import native
from hetero_llm.cpu.draft_worker.kv_layout import (
    BLOCK,
    KVLayout,
    PrefixTokens,
    StepSize,
    num_columns,
)
from hetero_llm.cpu.draft_worker.torch_path import TorchPath
from hetero_llm.cpu.draft_worker.tree_ops import TreeNodes
from hetero_llm.cpu.executor import (
    CANDIDATES,
    MOST_CANDIDATES,
    Candidates,
    Executor,
    StepInput,
    StepSamples,
    unsupported_reason,
)
from hetero_llm.cpu.fused import speed_up
from hetero_llm.models.config import ModelConfig
from hetero_llm.models.loader import load_model
from hetero_llm.models.quantization_config import with_plain_weights
from hetero_llm.models.read_config import load_model_config
from hetero_llm.models.registry import model_class
from hetero_llm.runner.kv_cache import KVCacheShape
from hetero_llm.utils.topology import usable_memory_bytes

logger = logging.getLogger(__name__)

_OWN_FORMAT = {torch.bfloat16: "bf16", torch.float32: "float"}
_ROUNDED = ("int8", "int4")


@dataclass(frozen=True, slots=True)
class DraftSizes:
    """Sizes of a draft model's buffers.

    Attributes:
        slots: number of request slots.
        max_model_len: longest sequence in tokens; the model's own limit applies, too.
        window: tokens at the end of a longer sequence that are attended to, besides its first
            `BLOCK`; a multiple of `BLOCK`.
        most_rows: maximum tokens of a step, committed tokens and tree nodes together.
        candidates: number of candidates returned for each sample.
    """

    slots: int
    max_model_len: int
    window: int = 1024
    most_rows: int = 512
    candidates: int = 8

    def __post_init__(self) -> None:
        for name in ("slots", "max_model_len", "window", "most_rows", "candidates"):
            if getattr(self, name) < 1:
                raise ConfigError(name, getattr(self, name), "must be at least 1")
        if self.window % BLOCK:
            raise ConfigError("window", self.window, f"must be a multiple of {BLOCK} tokens")
        if self.candidates > MOST_CANDIDATES:
            raise ConfigError("candidates", self.candidates, f"at most {MOST_CANDIDATES}")


class Found(NamedTuple):
    """Result of a step; views that the next step overwrites.

    Attributes:
        ready: [r] int32 slots of which no committed token is pending any more, in step order.
        tokens, log_probs: [r + R, K] int32 and float32 candidates, most likely first: after these
            sequences, then after the R tree nodes. With a temperature, scores include the sampling
            noise of `sampling/noise.py`.
    """

    ready: np.ndarray
    tokens: np.ndarray
    log_probs: np.ndarray


class DraftModel:
    """The weights, the KV layout and the executor; made by `load`.

    Attributes:
        vocab_size: vocabulary size.
        max_positions: longest sequence in tokens.
        backend: "native" or "torch".
        kv_layout: the sequences and their KV.
        most_rows: maximum tokens of a step.
    """

    def __init__(
        self,
        config: ModelConfig,
        path: _NativePath | TorchPath,
        kv_layout: KVLayout,
        found: Candidates,
    ) -> None:
        self.vocab_size, self.max_positions = config.vocab_size, config.max_model_len
        self.backend = "torch" if isinstance(path, TorchPath) else "native"
        self.kv_layout, self.most_rows = kv_layout, len(found.tokens)
        self._path, self._found = path, found

    @classmethod
    def load(
        cls,
        folder: Path,
        sizes: DraftSizes,
        *,
        dtype: torch.dtype,
        weight_format: str,
        threads: int,
        cpus: tuple[int, ...] | None = None,
        load_format: str = "auto",
        allow_pickle: bool = False,
    ) -> DraftModel:
        """Load a model folder.

        Args:
            dtype: type of KV and activations: bfloat16 or float32.
            weight_format: "bf16" or "float", matching dtype, or "int8" or "int4" (native backend
                only).
            threads: compute threads.
            cpus: CPU of each thread; None: threads are not pinned.
            load_format: "auto", or "dummy" for random weights.
            allow_pickle: whether pickled weight files may be read.

        Raises:
            ConfigError: an argument that this machine or model does not support.
            ModelLoadError: the folder holds no supported model, or it does not fit into memory.
        """
        folder = Path(folder)
        _check_threads(threads, cpus)
        config = _config(folder, sizes, weight_format)
        why_torch = _why_torch(config, dtype, weight_format)
        needed = _check_memory(folder, config, sizes, dtype)
        try:
            model = load_model(
                folder, config, dtype=dtype, device="cpu", show_progress=False,
                load_format=load_format, allow_pickle=allow_pickle,
            )  # fmt: skip
            kv_layout = KVLayout(
                _cache_shape(config, dtype), sizes.slots, window=sizes.window,
                max_positions=config.max_model_len, vocab_size=config.vocab_size,
                most_rows=sizes.most_rows,
            )  # fmt: skip
            found = Candidates.empty(sizes.most_rows, sizes.candidates)
            path: _NativePath | TorchPath
            if why_torch is None:
                library = native.load()
                assert library is not None
                executor = Executor(
                    model, config, kv_layout.cache, library=library, threads=threads, cpus=cpus,
                    weight_format=weight_format, isa=native.isa_level(),
                )  # fmt: skip
                path = _NativePath(executor, kv_layout, found)
            else:
                torch.set_num_threads(threads)
                speed_up(model)
                path = TorchPath(model, config, kv_layout, found)
        except (MemoryError, RuntimeError) as error:
            # torch reports failed host allocations as a plain RuntimeError
            if isinstance(error, RuntimeError) and "allocate memory" not in str(error):
                raise
            raise ModelLoadError(f"{folder}: out of memory: {needed}") from error
        backend = "native executor" if why_torch is None else f"torch ({why_torch})"
        logger.info(
            "draft model: %s, %d threads, %s weights; %s", backend, threads, weight_format, needed
        )
        return cls(config, path, kv_layout, found)

    def step(self, prefix: PrefixTokens, nodes: TreeNodes) -> Found:
        """Run a step of at most `most_rows` tokens.

        Args:
            prefix: result of `plan_prefix`, or fewer tokens.
            nodes: tree nodes of sequences without pending tokens.
        """
        size = self.kv_layout.fill(prefix, nodes)
        if size.rows:
            self._path.run(size)
        samples, found = size.samples, self._found
        return Found(
            self.kv_layout.ready[: size.ready], found.tokens[:samples], found.log_probs[:samples]
        )


class _NativePath:
    """Runs the steps that `KVLayout.fill` lays out with the native executor."""

    def __init__(self, executor: Executor, kv_layout: KVLayout, found: Candidates) -> None:
        arrays = kv_layout.arrays
        rows = StepInput(
            token_ids=arrays.token_ids,
            positions=arrays.positions,
            slot_mapping=arrays.slot_mapping,
            request_slots=arrays.slots,
            num_computed_tokens=arrays.starts,
            num_scheduled_tokens=arrays.counts,
            is_tree=arrays.is_tree,
            bases=arrays.bases,
            ancestors=arrays.ancestors,
            block_tables=kv_layout.block_tables,
        )
        samples = StepSamples(
            token_indices=arrays.sample_rows,
            modes=np.full(len(arrays.sample_rows), CANDIDATES, np.uint8),
            temperatures=arrays.temperatures,
            seeds=arrays.seeds,
            positions=arrays.sample_positions,
            sample_indices=arrays.sample_indices,
        )
        self._executor = executor
        self._arrays = rows, samples, found  # keeps their memory alive for the library
        self._step = executor.prepare(rows, samples, np.zeros(0, np.int64), found)

    def run(self, size: StepSize) -> None:
        self._executor.run(self._step, size.rows, size.sequences, size.samples)


def best_format(folder: Path, dtype: torch.dtype) -> str:
    """The default weight format: "int8" with dtype bfloat16 where the executor supports it, which
    takes 0.5 to 0.8 of the time (bench/speculation/draft_step.py), else the format of dtype.

    Raises:
        ConfigError: dtype is neither bfloat16 nor float32.
        ModelLoadError: the folder's configuration cannot be read or served.
    """
    own = _own_format(dtype)
    runs = _why_torch(load_model_config(folder), dtype, own) is None
    return "int8" if runs and dtype == torch.bfloat16 else own


def _own_format(dtype: torch.dtype) -> str:
    if dtype not in _OWN_FORMAT:
        raise ConfigError("dtype", str(dtype), "a draft model is bfloat16 or float32")
    return _OWN_FORMAT[dtype]


def _check_threads(threads: int, cpus: tuple[int, ...] | None) -> None:
    if threads < 1:
        raise ConfigError("threads", threads, "must be at least 1")
    if cpus is not None and len(cpus) != threads:
        raise ConfigError("cpus", cpus, f"one for each of {threads} threads is needed")


def _config(folder: Path, sizes: DraftSizes, weight_format: str) -> ModelConfig:
    """The model's configuration, its context limited to `sizes.max_model_len`. Blocks of a GGUF
    file stay as they are where weights are rounded otherwise."""
    config = load_model_config(folder)
    if weight_format not in _ROUNDED:
        config = with_plain_weights(config)
    if sizes.candidates > config.vocab_size:
        reason = f"the draft model knows only {config.vocab_size} tokens"
        raise ConfigError("candidates", sizes.candidates, reason)
    return replace(config, max_model_len=min(config.max_model_len, sizes.max_model_len))


def _why_torch(config: ModelConfig, dtype: torch.dtype, weight_format: str) -> str | None:
    """Why torch must run the model; None: the executor supports it."""
    own = _own_format(dtype)
    if weight_format not in (own, *_ROUNDED):
        raise ConfigError("weight_format", weight_format, f"{own!r}, as dtype, 'int8' or 'int4'")
    reason = unsupported_reason(config, dtype)
    if reason is None and native.load() is None:
        reason = "the compiled library is not available"
    if reason is not None and weight_format in _ROUNDED:
        raise ConfigError("weight_format", weight_format, f"needs the native backend: {reason}")
    return reason


def _cache_shape(config: ModelConfig, dtype: torch.dtype) -> KVCacheShape:
    return KVCacheShape(config.num_layers, config.num_kv_heads, config.head_dim, BLOCK, dtype)


def _check_memory(folder: Path, config: ModelConfig, sizes: DraftSizes, dtype: torch.dtype) -> str:
    """The memory that the model needs, as text; a `ModelLoadError` if that is not free."""
    with torch.device("meta"):
        parameters = model_class(config.architecture)(config).parameters()
    weights = sum(parameter.numel() for parameter in parameters) * dtype.itemsize
    columns = num_columns(sizes.window, config.max_model_len)
    kv = sizes.slots * columns * _cache_shape(config, dtype).block_bytes
    needed = (
        f"{weights} bytes of weights, {kv} bytes of KV cache for {sizes.slots} sequences of "
        f"{columns * BLOCK} tokens"
    )
    free = usable_memory_bytes()
    if weights + kv > free:
        raise ModelLoadError(f"{folder}: the draft model needs {needed}; {free} bytes are free")
    return needed
