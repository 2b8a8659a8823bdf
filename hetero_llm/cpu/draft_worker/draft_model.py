"""The draft model of the CPU draft worker: which tokens may follow committed texts and tree nodes.

    model = DraftModel.load(folder, sizes, dtype=torch.bfloat16, weight_format="int8", threads=8)
    model.open(slot, prompt)
    found = model.step(model.plan_trunk(256), Branches(*forest.choose(seconds)[:6]))
    model.append(slot, committed)
    model.keep(slots, moves)                                # of `Forest.commit`

A step runs pending tokens of some texts (the trunk) and tree nodes of others; a text's nodes can
run once nothing of it is pending. What it finds goes to a `Forest`. One thread at a time.
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
    Branches,
    Pages,
    StepSize,
    Trunk,
    num_columns,
)
from hetero_llm.cpu.draft_worker.torch_path import TorchPath
from hetero_llm.cpu.draft_worker.tree_ops import Moves
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
from hetero_llm.models.layers import CausalLM
from hetero_llm.models.loader import load_model
from hetero_llm.models.read_config import load_model_config
from hetero_llm.models.registry import model_class
from hetero_llm.runner.kv_cache import KVCacheShape
from hetero_llm.utils.topology import usable_memory_bytes

logger = logging.getLogger(__name__)

_OWN_FORMAT = {torch.bfloat16: "bf16", torch.float32: "float"}


@dataclass(frozen=True, slots=True)
class DraftSizes:
    """Room of a draft model.

    Attributes:
        slots: sequences.
        max_model_len: tokens of the longest text; the model's own limit holds, too.
        window: tokens that rows see of a longer text, besides its first `BLOCK`: a multiple of it.
        most_rows: of a step, trunk and nodes together.
        candidates: likeliest tokens told after a row.
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
    """What a step found; views that the next step overwrites.

    Attributes:
        ready: [r] int32 slots whose texts came to their end, in the order of the trunk.
        tokens, log_probs: [r + R, K] int32 and float32, likeliest first: after those texts, then
            after the R branch rows. With a temperature, of noisy scores: see `sampling/noise.py`.
    """

    ready: np.ndarray
    tokens: np.ndarray
    log_probs: np.ndarray


class DraftModel:
    """Holds the weights, the KV pages and a team of threads; made by `load`.

    Attributes:
        vocab_size: tokens it knows. max_positions: tokens of the longest text it drafts for.
        backend: "native" or "torch".
        pages: the texts and their KV.
        most_rows: of a step.
    """

    def __init__(
        self, config: ModelConfig, path: _NativePath | TorchPath, pages: Pages, found: Candidates
    ) -> None:
        self.vocab_size, self.max_positions = config.vocab_size, config.max_model_len
        self.backend = "torch" if isinstance(path, TorchPath) else "native"
        self.pages, self.most_rows = pages, len(found.tokens)
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
        """Reads a model folder.

        Args:
            dtype: of KV and activations: bfloat16 or float32.
            weight_format: "bf16" or "float", as dtype, or "int8", which torch cannot run.
            threads: that compute a step. cpus: each thread's own; None: they may wander.
            load_format: of the weights: "auto", or "dummy" for random ones. allow_pickle: whether
                pickled files may be read.

        Raises:
            ConfigError: an argument that this machine or model cannot do.
            ModelLoadError: the folder holds no model that we know, or none that fits into memory.
        """
        folder = Path(folder)
        _check_threads(threads, cpus)
        config = _config(folder, sizes)
        why_torch = _why_torch(config, dtype, weight_format)
        needed = _check_memory(folder, config, sizes, dtype)
        try:
            model = load_model(
                folder, config, dtype=dtype, device="cpu", show_progress=False,
                load_format=load_format, allow_pickle=allow_pickle,
            )  # fmt: skip
            pages = _pages(config, sizes, dtype)
            shape = (sizes.most_rows, sizes.candidates)
            found = Candidates(np.zeros(shape, np.int32), np.zeros(shape, np.float32))
            path: _NativePath | TorchPath
            if why_torch is None:
                executor = _executor(model, config, pages, weight_format, threads, cpus)
                path = _NativePath(executor, pages, found)
            else:
                torch.set_num_threads(threads)
                speed_up(model)
                path = TorchPath(model, config, pages, found)
        except (MemoryError, RuntimeError) as error:
            # torch has no class of its own for host memory that it does not get
            if isinstance(error, RuntimeError) and "allocate memory" not in str(error):
                raise
            raise ModelLoadError(f"{folder}: out of memory: {needed}") from error
        backend = "native executor" if why_torch is None else f"torch ({why_torch})"
        logger.info(
            "draft model: %s, %d threads, %s weights; %s", backend, threads, weight_format, needed
        )
        return cls(config, path, pages, found)

    # -- texts: see `Pages` -----------------------------------------------------------------

    def open(
        self,
        slot: int,
        tokens: np.ndarray,
        *,
        temperature: float = 0.0,
        seed: int = 0,
        sample_index: int = 0,
    ) -> None:
        """Starts a sequence with its text so far; see `Pages.open`.

        Raises:
            PromptError: a token beyond the vocabulary, or too many; the slot is left empty.
        """
        self.pages.open(slot, tokens, temperature=temperature, seed=seed, sample_index=sample_index)

    def append(self, slot: int, tokens: np.ndarray) -> None:
        """Adds committed tokens; before `keep`, if tree rows stay.

        Raises:
            PromptError: as `open`; the text stays as it was.
        """
        self.pages.append(slot, tokens)

    def close(self, slot: int) -> None:
        """Forgets a sequence."""
        self.pages.close(slot)

    def pending(self, slot: int) -> int:
        """Trunk rows still to run."""
        return self.pages.pending(slot)

    def room(self, slot: int) -> int:
        """Positions left behind the text: its tree may be so deep and no deeper."""
        return self.pages.room(slot)

    def plan_trunk(self, most_rows: int) -> Trunk:
        """What of the pending tokens to run next; see `Pages.plan_trunk`."""
        return self.pages.plan_trunk(most_rows)

    def keep(self, slots: np.ndarray, moves: Moves) -> None:
        """Moves tree rows that stay after commits; see `Pages.keep`."""
        self.pages.keep(slots, moves)

    # -- steps ------------------------------------------------------------------------------

    def step(self, trunk: Trunk, branches: Branches) -> Found:
        """Runs a step of at most `most_rows` rows.

        Args:
            trunk: of `plan_trunk`, or fewer. branches: of texts with nothing pending.
        """
        size = self.pages.fill(trunk, branches)
        if size.rows:
            self._path.run(size)
        draws, found = size.draws, self._found
        return Found(self.pages.ready[: size.ready], found.tokens[:draws], found.log_probs[:draws])


class _NativePath:
    """Runs the steps that `Pages` lays out through the executor."""

    def __init__(self, executor: Executor, pages: Pages, found: Candidates) -> None:
        arrays = pages.arrays
        rows = StepInput(
            token_ids=arrays.token_ids,
            positions=arrays.positions,
            slot_mapping=arrays.cache_rows,
            request_slots=arrays.slots,
            num_computed_tokens=arrays.starts,
            num_scheduled_tokens=arrays.counts,
            is_tree=arrays.is_tree,
            bases=arrays.bases,
            ancestors=arrays.ancestors,
            block_tables=pages.tables,
        )
        draws = StepSamples(
            token_indices=arrays.draw_rows,
            modes=np.full(len(arrays.draw_rows), CANDIDATES, np.uint8),
            temperatures=arrays.temperatures,
            seeds=arrays.seeds,
            positions=arrays.draw_positions,
            sample_indices=arrays.sample_indices,
        )
        self._executor = executor
        self._arrays = rows, draws, found  # the library reads and writes their memory
        self._step = executor.prepare(rows, draws, np.zeros(0, np.int64), found)

    def run(self, size: StepSize) -> None:
        self._executor.run(self._step, size.rows, size.sequences, size.draws)


def best_format(folder: Path, dtype: torch.dtype) -> str:
    """The weight format for a model that has no other wishes: "int8" beside bfloat16 where the
    executor runs it, which takes 0.5 to 0.8 of the time (bench/draft_step.py), else as dtype.

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


def _config(folder: Path, sizes: DraftSizes) -> ModelConfig:
    """The model's, its context no longer than is wanted."""
    config = load_model_config(folder)
    if sizes.candidates > config.vocab_size:
        reason = f"the draft model knows only {config.vocab_size} tokens"
        raise ConfigError("candidates", sizes.candidates, reason)
    return replace(config, max_model_len=min(config.max_model_len, sizes.max_model_len))


def _why_torch(config: ModelConfig, dtype: torch.dtype, weight_format: str) -> str | None:
    """Why torch runs the model; None: the executor does."""
    own = _own_format(dtype)
    if weight_format not in (own, "int8"):
        raise ConfigError("weight_format", weight_format, f"{own!r}, as dtype, or 'int8'")
    reason = unsupported_reason(config, dtype)
    if reason is None and native.load() is None:
        reason = "the compiled library is not available"
    if reason is not None and weight_format == "int8":
        raise ConfigError("weight_format", weight_format, f"needs the native backend: {reason}")
    return reason


def _cache_shape(config: ModelConfig, dtype: torch.dtype) -> KVCacheShape:
    return KVCacheShape(config.num_layers, config.num_kv_heads, config.head_dim, BLOCK, dtype)


def _check_memory(folder: Path, config: ModelConfig, sizes: DraftSizes, dtype: torch.dtype) -> str:
    """What the model needs, in words; a `ModelLoadError` if that is more than there is."""
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


def _pages(config: ModelConfig, sizes: DraftSizes, dtype: torch.dtype) -> Pages:
    return Pages(
        _cache_shape(config, dtype),
        sizes.slots,
        window=sizes.window,
        max_positions=config.max_model_len,
        vocab_size=config.vocab_size,
        most_rows=sizes.most_rows,
    )


def _executor(
    model: CausalLM,
    config: ModelConfig,
    pages: Pages,
    weight_format: str,
    threads: int,
    cpus: tuple[int, ...] | None,
) -> Executor:
    library = native.load()
    assert library is not None
    return Executor(
        model, config, pages.cache, library=library, threads=threads, cpus=cpus,
        weight_format=weight_format, isa=native.isa_level(),
    )  # fmt: skip
