"""The native whole-step executor: weights go into the library once, then a step is one call.

Contract: `csrc/step/executor.h`. Twin: `runner.model_runner.TorchModelRunner`. Benches:
`bench/cpu_offline.py`, `bench/draft_step.py`.
"""

from __future__ import annotations

import ctypes
import weakref
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import torch
from torch import nn

from hetero_llm.models.config import ModelConfig
from hetero_llm.models.layers import CausalLM, Linear
from hetero_llm.models.llama import LlamaForCausalLM, LlamaLayer
from hetero_llm.models.registry import model_class
from hetero_llm.runner.kv_cache import PagedKVCache

WEIGHT_FORMATS = {"bf16": 0, "float": 1, "int8": 2}
"""How weights are held: numbers of `Format` in csrc/step/matmul.h."""
GREEDY, NOISY, LOGITS_ONLY = 0, 1, 2
"""Modes of a sampled row."""

_DTYPES = {torch.bfloat16: 0, torch.float32: 1}
_ACTIVATIONS = {"silu": 0, "gelu_new": 1, "gelu_pytorch_tanh": 1, "gelu": 2}
_LANES = 8
_LONG, _DOUBLE, _POINTER = ctypes.c_int64, ctypes.c_double, ctypes.c_void_p
_OUTSIDE_LAYERS = -1
(
    _EMBEDDING, _FINAL_NORM, _HEAD, _NORM, _QKV, _QKV_BIAS, _OUT, _OUT_BIAS, _SECOND_NORM,
    _GATE_UP, _DOWN, _Q_NORM, _K_NORM,
) = range(13)  # fmt: skip


class _Model(ctypes.Structure):
    """`HeteroModel`."""

    _fields_ = [
        *((name, _LONG) for name in ("layers", "hidden", "inner", "heads", "kv_heads", "dim")),
        *((name, _LONG) for name in ("vocab", "rotary_dim", "max_positions", "weight_format")),
        *((name, _LONG) for name in ("activation", "qk_norm", "cache_is_bf16", "tied_head")),
        ("eps", _DOUBLE),
        ("attention_scale", _DOUBLE),
    ]


_ROWS = (
    ("token_ids", np.int32),
    ("positions", np.int32),
    ("cache_rows", np.int32),
    ("slots", np.int32),
    ("starts", np.int32),
    ("counts", np.int32),
    ("is_tree", np.uint8),
    ("ancestors", np.uint64),
    ("tables", np.int32),
)
_DRAWS = (
    ("rows", np.int32),
    ("modes", np.uint8),
    ("temperatures", np.float32),
    ("seeds", np.uint64),
    ("positions", np.int32),
    ("sample_indices", np.int32),
)


class _Step(ctypes.Structure):
    """`HeteroStep`."""

    _fields_ = [
        *((name, _LONG) for name in ("rows", "sequences", "samples", "columns")),
        *((name, _POINTER) for name, _ in _ROWS),
        *((f"draw_{name}", _POINTER) for name, _ in _DRAWS),
        *((name, _POINTER) for name in ("tokens", "logits", "hidden")),
    ]


@dataclass(frozen=True, slots=True)
class StepRows:
    """What a step runs: T rows of S sequences. Contiguous arrays.

    Attributes:
        token_ids, positions: [T] int32.
        cache_rows: [T] int32 KV slot (block * block size + offset) of each row.
        slots, starts, counts: [S] int32 place in `tables`, tokens in the cache before the step,
            rows.
        is_tree: [S] uint8; ancestors: [T] uint64, of a tree's rows the bits of their ancestors
            and themselves, counted from the sequence's first row. Others are not looked at.
        tables: [slots, columns] int32 block ids.
    """

    token_ids: np.ndarray
    positions: np.ndarray
    cache_rows: np.ndarray
    slots: np.ndarray
    starts: np.ndarray
    counts: np.ndarray
    is_tree: np.ndarray
    ancestors: np.ndarray
    tables: np.ndarray

    def __post_init__(self) -> None:
        _check(self, _ROWS)
        count, sequences = len(self.token_ids), len(self.slots)
        assert len(self.positions) == len(self.cache_rows) == len(self.ancestors) == count
        assert len(self.starts) == len(self.counts) == len(self.is_tree) == sequences
        assert self.tables.ndim == 2


@dataclass(frozen=True, slots=True)
class StepDraws:
    """N draws of a step. Contiguous arrays.

    Attributes:
        rows: [N] int32 row that each draw follows; several may follow one.
        modes: [N] uint8 `GREEDY`, `NOISY` or `LOGITS_ONLY`.
        temperatures: [N] float32; seeds: [N] uint64; positions: [N] int32 position of the token
            to be drawn; sample_indices: [N] int32. Of noisy draws.
    """

    rows: np.ndarray
    modes: np.ndarray
    temperatures: np.ndarray
    seeds: np.ndarray
    positions: np.ndarray
    sample_indices: np.ndarray

    def __post_init__(self) -> None:
        _check(self, _DRAWS)
        assert len({len(getattr(self, name)) for name, _ in _DRAWS}) == 1


@dataclass(frozen=True, slots=True)
class PreparedStep:
    """Arrays whose addresses are known: see `Executor.prepare`."""

    struct: _Step


def logits_after(rows: np.ndarray) -> StepDraws:
    """No draws, but the logits of these rows."""
    count = len(rows)
    zeros, words = np.zeros(count, np.int32), np.zeros(count, np.uint64)
    modes, ones = np.full(count, LOGITS_ONLY, np.uint8), np.ones(count, np.float32)
    return StepDraws(np.ascontiguousarray(rows, np.int32), modes, ones, words, zeros, zeros)


def unsupported_reason(config: ModelConfig, dtype: torch.dtype) -> str | None:
    """Why the executor cannot run such a model, in one line; None if it can."""
    if not issubclass(model_class(config.architecture), LlamaForCausalLM):
        return f"{config.architecture} is not one of its families"
    if dtype not in _DTYPES:
        return f"{str(dtype).removeprefix('torch.')} is not one of its types"
    if config.head_dim % _LANES:
        return f"heads of {config.head_dim} are no multiple of {_LANES}"
    if config.hidden_act not in _ACTIVATIONS:
        return f"{config.hidden_act} is not one of its activations"
    if config.mlp_bias:
        return "it has no biases in the MLP"
    return None


def native_format(dtype: torch.dtype, weight_dtype: str) -> str:
    """The weight format for a model's type and `cpu_weight_dtype`."""
    return "int8" if weight_dtype == "int8" else ("bf16", "float")[_DTYPES[dtype]]


class Executor:
    """Owns the packed weights and a team of threads. One caller at a time.

    The model's own tensors are emptied as they are handed over, so that memory does not double:
    afterwards the module cannot run.

    Args:
        model: a module that `unsupported_reason` has nothing against, on the CPU.
        config: its configuration.
        cache: the paged KV cache, float32 or bfloat16; read and written by steps.
        library: of `native.load`.
        threads: of the team, the caller included.
        cpus: one logical CPU per thread to pin it to, the caller's is not looked at; None leaves
            placement to the system.
        weight_format: of `WEIGHT_FORMATS`.
        isa: level of csrc/step/isa.h; -1 for the machine's best.

    Raises:
        MemoryError: the library got no memory.
    """

    def __init__(
        self,
        model: CausalLM,
        config: ModelConfig,
        cache: PagedKVCache,
        *,
        library: ctypes.CDLL,
        threads: int,
        cpus: tuple[int, ...] | None,
        weight_format: str,
        isa: int = -1,
    ) -> None:
        assert isinstance(model, LlamaForCausalLM) and config.rope is not None
        assert cache.shape.dtype in _DTYPES and cache.data.is_contiguous()
        assert threads >= 1 and (cpus is None or len(cpus) == threads), (threads, cpus)
        _declare(library)
        self._run = library.hetero_executor_step
        self._vocab_size = config.vocab_size
        sizes = _sizes(model, config, cache, WEIGHT_FORMATS[weight_format])
        windows = np.array([window or 0 for window in config.sliding_windows], np.int64)
        rotary = model.rotary.table.float().contiguous()
        places = None if cpus is None else np.array(cpus, np.int32)
        handle = library.hetero_executor_new(
            ctypes.byref(sizes),
            cache.data.data_ptr(),
            cache.shape.block_size,
            windows.ctypes.data,
            rotary.data_ptr(),
            threads,
            None if places is None else places.ctypes.data,
            isa,
        )
        if not handle:
            raise MemoryError("no memory for the packed weights")
        self._handle = handle
        self._cache = cache  # the library reads and writes its memory
        self._free = weakref.finalize(self, library.hetero_executor_free, handle)
        _hand_over(library, handle, model)

    def step(self, rows: StepRows, draws: StepDraws) -> np.ndarray:
        """Runs a step: K and V of its rows go to the cache. [N] int64 drawn tokens."""
        tokens = np.empty(len(draws.rows), np.int64)
        self._call(rows, draws, tokens, None)
        return tokens

    def prepare(self, rows: StepRows, draws: StepDraws, tokens: np.ndarray) -> PreparedStep:
        """For many steps through the same arrays, which have to live on: see `run`."""
        return PreparedStep(_Step(0, 0, 0, rows.tables.shape[1], *_addresses(rows, draws, tokens)))

    def run(self, step: PreparedStep, rows: int, sequences: int, draws: int) -> None:
        """Runs a step of the first entries of the prepared arrays; the tokens lie in `tokens`."""
        struct = step.struct
        struct.rows, struct.sequences, struct.samples = rows, sequences, draws
        self._run(self._handle, ctypes.byref(struct))

    def logits(self, rows: StepRows, after: np.ndarray) -> torch.Tensor:
        """Runs a step without draws.

        Args:
            after: [N] rows of the step.

        Returns:
            [N, vocab] float32.
        """
        logits = torch.empty(len(after), self._vocab_size)
        self._call(rows, logits_after(after), np.empty(len(after), np.int64), logits)
        return logits

    def _call(
        self, rows: StepRows, draws: StepDraws, tokens: np.ndarray, logits: torch.Tensor | None
    ) -> None:
        step = _Step(
            len(rows.token_ids),
            len(rows.slots),
            len(draws.rows),
            rows.tables.shape[1],
            *_addresses(rows, draws, tokens),
            None if logits is None else logits.data_ptr(),
            None,
        )
        self._run(self._handle, ctypes.byref(step))


def _addresses(rows: StepRows, draws: StepDraws, tokens: np.ndarray) -> list[int]:
    return [
        *(getattr(rows, name).ctypes.data for name, _ in _ROWS),
        *(getattr(draws, name).ctypes.data for name, _ in _DRAWS),
        tokens.ctypes.data,
    ]


def _declare(library: ctypes.CDLL) -> None:
    library.hetero_executor_new.restype = _POINTER
    library.hetero_executor_new.argtypes = [
        *(_POINTER, _POINTER, _LONG, _POINTER, _POINTER, _LONG, _POINTER, _LONG)
    ]
    library.hetero_executor_free.restype = None
    library.hetero_executor_free.argtypes = [_POINTER]
    library.hetero_executor_set.restype = _LONG
    library.hetero_executor_set.argtypes = [
        *(_POINTER, _LONG, _LONG, _POINTER, _LONG, _LONG, _LONG)
    ]
    library.hetero_executor_step.restype = None
    library.hetero_executor_step.argtypes = [_POINTER, _POINTER]


def _check(arrays: StepRows | StepDraws, types: tuple[tuple[str, type], ...]) -> None:
    for name, kind in types:
        array = getattr(arrays, name)
        assert array.dtype == kind and array.flags.c_contiguous, (name, array.dtype)


def _sizes(
    model: LlamaForCausalLM, config: ModelConfig, cache: PagedKVCache, weight_format: int
) -> _Model:
    assert config.rope is not None
    return _Model(
        config.num_layers,
        config.hidden_size,
        config.intermediate_size,
        config.num_heads,
        config.num_kv_heads,
        config.head_dim,
        config.vocab_size,
        config.rope.rotary_dim,
        len(model.rotary.table),
        weight_format,
        _ACTIVATIONS[config.hidden_act],
        int(config.qk_norm),
        int(cache.shape.dtype == torch.bfloat16),
        int(config.tie_word_embeddings),
        config.norm_eps,
        config.attn_scale,
    )


def _hand_over(library: ctypes.CDLL, handle: int, model: LlamaForCausalLM) -> None:
    """Gives every weight to the library, in the order in which steps read them."""
    tied = model.lm_head.weight is model.embed_tokens.weight
    for layer, which, parameter in _weights(model):
        data = parameter.data.contiguous()
        rows, columns = data.shape if data.dim() == 2 else (1, len(data))
        failed = library.hetero_executor_set(
            handle, layer, which, data.data_ptr(), rows, columns, _DTYPES[data.dtype]
        )
        assert not failed, (layer, which, tuple(data.shape))
        if which != _EMBEDDING or not tied:  # a tied head comes later
            parameter.data = data.new_empty(0)


def _weights(model: LlamaForCausalLM) -> Iterator[tuple[int, int, nn.Parameter]]:
    yield _OUTSIDE_LAYERS, _EMBEDDING, model.embed_tokens.weight
    for index, layer in enumerate(model.layers):
        assert isinstance(layer, LlamaLayer)
        yield index, _NORM, layer.input_norm.weight
        yield from _linear(index, layer.qkv_proj, _QKV, _QKV_BIAS)
        if layer.heads.qk_norm is not None:
            yield index, _Q_NORM, layer.heads.qk_norm.q_weight
            yield index, _K_NORM, layer.heads.qk_norm.k_weight
        yield from _linear(index, layer.o_proj, _OUT, _OUT_BIAS)
        yield index, _SECOND_NORM, layer.post_attention_norm.weight
        yield index, _GATE_UP, layer.gate_up_proj.weight
        yield index, _DOWN, layer.down_proj.weight
    yield _OUTSIDE_LAYERS, _FINAL_NORM, model.norm.weight
    yield _OUTSIDE_LAYERS, _HEAD, model.lm_head.weight


def _linear(
    layer: int, linear: Linear, weight: int, bias: int
) -> Iterator[tuple[int, int, nn.Parameter]]:
    yield layer, weight, linear.weight
    if linear.bias is not None:
        yield layer, bias, linear.bias
