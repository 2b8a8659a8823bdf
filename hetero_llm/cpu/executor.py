"""The native whole-step executor: weights go into the library once, then a step is one call.

C interface: `csrc/step/executor.h`. Reference: `runner.model_runner.TorchModelRunner`. Benches:
`bench/engine/cpu_offline.py`, `bench/speculation/draft_step.py`.
"""

from __future__ import annotations

import ctypes
import logging
import weakref
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from time import perf_counter
from typing import Any, cast

import numpy as np
import torch
from torch import nn

from hetero_llm.core.lora import NO_ADAPTER
from hetero_llm.cpu import native
from hetero_llm.cpu.core_watch import CoreWatch
from hetero_llm.cpu.weight_forms import (
    HEAD_FORMATS,
    Form,
    describe_others,
    form_of,
    keep,
    rounded_form,
)
from hetero_llm.lora.adapter import Adapter
from hetero_llm.models.blocks import Attention, DecoderLM
from hetero_llm.models.config import ModelConfig
from hetero_llm.models.configs.mixture import MixtralConfig, Qwen2MoeConfig, Qwen3MoeConfig
from hetero_llm.models.experts import Experts
from hetero_llm.models.layers import CausalLM, Linear
from hetero_llm.models.llama import LlamaForCausalLM
from hetero_llm.models.mixtral import MixtralBlock, MixtralForCausalLM
from hetero_llm.models.qwen2_moe import Qwen2MoeForCausalLM
from hetero_llm.models.qwen3_moe import Qwen3MoeForCausalLM
from hetero_llm.models.registry import model_class
from hetero_llm.quantization.matrix import (
    QuantizedMatrix,
    QuantizedStack,
    QuantizedWeight,
    dequantize,
)
from hetero_llm.runner.kv_cache import PagedKVCache
from hetero_llm.utils import topology

logger = logging.getLogger(__name__)

GREEDY, NOISY, LOGITS_ONLY, CANDIDATES = 0, 1, 2, 3
"""Sampling modes: the likeliest token, the likeliest with noise, no token, the K likeliest."""
MOST_CANDIDATES = 16
TREE_WINDOW = 64
"""KV indices that a tree's tokens may see or not, their own included."""

_DTYPES = {torch.bfloat16: 0, torch.float32: 1}
_MLP_MAKERS = (
    DecoderLM.make_mlp,
    MixtralForCausalLM.make_mlp,
    Qwen2MoeForCausalLM.make_mlp,
    Qwen3MoeForCausalLM.make_mlp,
)
_ACTIVATIONS = {"silu": 0, "gelu_new": 1, "gelu_pytorch_tanh": 1, "gelu": 2}
_LANES = 8
_LONG, _DOUBLE, _POINTER = ctypes.c_int64, ctypes.c_double, ctypes.c_void_p
_OUTSIDE_LAYERS = -1
(
    _EMBEDDING, _FINAL_NORM, _HEAD, _NORM, _QKV, _QKV_BIAS, _OUT, _OUT_BIAS, _SECOND_NORM,
    _GATE_UP, _DOWN, _Q_NORM, _K_NORM, _ROUTER, _SHARED_GATE, _EXPERTS_GATE_UP, _EXPERTS_DOWN,
) = range(17)  # fmt: skip
# Of a layer, in the order of `hetero_executor_new`'s forms.
_LAYER_MATRICES = (_QKV, _OUT, _GATE_UP, _DOWN, _ROUTER, _EXPERTS_GATE_UP, _EXPERTS_DOWN)
_EXPERTS = (_EXPERTS_GATE_UP, _EXPERTS_DOWN)
_ROUTERS = (_ROUTER, _SHARED_GATE)  # of the type of the model, whatever other weights have
# In the order of `HeteroAdapterProduct.product`.
_ADAPTED = (_QKV, _OUT, _GATE_UP, _DOWN, _ROUTER, _SHARED_GATE)
_NO_MEMORY = -2


class _Model(ctypes.Structure):
    """`HeteroModel`."""

    _fields_ = [
        *((name, _LONG) for name in ("layers", "hidden", "inner", "heads", "kv_heads", "dim")),
        *((name, _LONG) for name in ("vocab", "rotary_dim", "max_positions")),
        *((name, _LONG) for name in ("activation", "qk_norm", "cache_is_bf16", "tied_head")),
        *((name, _LONG) for name in ("experts", "experts_per_token", "expert_inner")),
        *((name, _LONG) for name in ("shared_inner", "renormalize")),
        ("sparse", _POINTER),
        ("eps", _DOUBLE),
        ("attention_scale", _DOUBLE),
    ]


class _Form(ctypes.Structure):
    """`Form` of csrc/step/matmul.h."""

    _fields_ = [(name, _LONG) for name in ("format", "group", "half_scales", "zeros")]


class _Quantized(ctypes.Structure):
    """`HeteroQuantized`."""

    _fields_ = [
        *((name, _LONG) for name in ("rows", "columns")),
        *((name, _POINTER) for name in ("data", "scales", "points", "offsets")),
    ]


class _AdapterPart(ctypes.Structure):
    """`HeteroAdapterPart`."""

    _fields_ = [
        *((name, _LONG) for name in ("first_row", "rows", "first_rank", "rank")),
        ("b", _POINTER),
    ]


class _AdapterProduct(ctypes.Structure):
    """`HeteroAdapterProduct`."""

    _fields_ = [
        *((name, _LONG) for name in ("layer", "product", "expert")),
        *((name, _LONG) for name in ("ranks", "columns", "num_parts")),
        ("a", _POINTER),
        ("scales", _POINTER),
    ]


class _Adapter(ctypes.Structure):
    """`HeteroAdapter`."""

    _fields_ = [("num_products", _LONG), ("products", _POINTER), ("parts", _POINTER)]


_INPUT = (
    ("token_ids", np.int32),
    ("positions", np.int32),
    ("slot_mapping", np.int32),
    ("request_slots", np.int32),
    ("num_computed_tokens", np.int32),
    ("num_scheduled_tokens", np.int32),
    ("bases", np.int32),
    ("is_tree", np.uint8),
    ("ancestors", np.uint64),
    ("block_tables", np.int32),
)
_SAMPLES = (
    ("token_indices", np.int32),
    ("modes", np.uint8),
    ("temperatures", np.float32),
    ("seeds", np.uint64),
    ("positions", np.int32),
    ("sample_indices", np.int32),
)


class _Step(ctypes.Structure):
    """`HeteroStep`."""

    _fields_ = [
        *((name, _LONG) for name in ("num_tokens", "num_sequences", "num_samples")),
        *((name, _LONG) for name in ("table_columns", "num_candidates", "mask_words")),
        *((name, _POINTER) for name, _ in _INPUT),
        ("adapter_slots", _POINTER),
        *((f"sample_{name}", _POINTER) for name, _ in _SAMPLES),
        *((name, _POINTER) for name in ("mask_rows", "masks")),
        *((name, _POINTER) for name in ("tokens", "candidates", "log_probs", "logits", "hidden")),
    ]


@dataclass(frozen=True, slots=True)
class StepInput:
    """The T tokens of a step, of S sequences. Contiguous arrays.

    Attributes:
        token_ids, positions: [T] int32.
        slot_mapping: [T] int32 KV slot (block * block size + offset) of each token.
        request_slots: [S] int32 row of each sequence in `block_tables`.
        num_computed_tokens: [S] int32 tokens in the KV cache before the step.
        num_scheduled_tokens: [S] int32 tokens in this step; their sum is T.
        bases: [S] int32, read for trees alone: the KV index where the tree's window begins. All its
            tokens see everything before. computed + scheduled - base is at most `TREE_WINDOW`, and
            indices below computed hold KV of earlier steps, visible or not.
        is_tree: [S] uint8.
        ancestors: [T] uint64, read for trees alone: bit i says whether the token sees KV index
            base + i: its ancestors', which lie before it, and its own.
        block_tables: [request slots, columns] int32 block ids.
        adapter_slots: [S] int32 slot of each sequence's adapter, `NO_ADAPTER`: it has none; None:
            no sequence has one.
    """

    token_ids: np.ndarray
    positions: np.ndarray
    slot_mapping: np.ndarray
    request_slots: np.ndarray
    num_computed_tokens: np.ndarray
    num_scheduled_tokens: np.ndarray
    bases: np.ndarray
    is_tree: np.ndarray
    ancestors: np.ndarray
    block_tables: np.ndarray
    adapter_slots: np.ndarray | None = None

    def __post_init__(self) -> None:
        _check(self, _INPUT)
        of_tokens = (self.token_ids, self.positions, self.slot_mapping, self.ancestors)
        of_sequences = (
            *(self.request_slots, self.num_computed_tokens, self.num_scheduled_tokens),
            *(self.bases, self.is_tree),
        )
        assert len({len(array) for array in of_tokens}) == 1
        assert len({len(array) for array in of_sequences}) == 1
        assert self.block_tables.ndim == 2
        slots = self.adapter_slots
        if slots is not None:
            assert slots.dtype == np.int32 and slots.flags.c_contiguous, slots.dtype
            assert len(slots) == len(self.request_slots)


@dataclass(frozen=True, slots=True)
class SampleMasks:
    """The tokens that each of N samples may take. Contiguous arrays.

    Attributes:
        rows: [N] int32 row of each sample in `words`; -1: it may take any token.
        words: [R, ceil(vocab / 32)] int32 token masks: bit `token % 32` of word `token // 32` is 1
            where the token is allowed.

    A forbidden token is neither sampled nor a candidate; a sample whose mask allows none takes
    token 0. Logits are those of all tokens. Parts of the head whose tokens all samples forbid are
    not computed.
    """

    rows: np.ndarray
    words: np.ndarray

    def __post_init__(self) -> None:
        for array in (self.rows, self.words):
            assert array.dtype == np.int32 and array.flags.c_contiguous, array.dtype
        assert self.rows.ndim == 1 and self.words.ndim == 2


@dataclass(frozen=True, slots=True)
class StepSamples:
    """N samples of a step. Contiguous arrays.

    Attributes:
        token_indices: [N] int32 index in the step of the token to sample after; may repeat.
        modes: [N] uint8 `GREEDY`, `NOISY`, `LOGITS_ONLY` or `CANDIDATES`.
        temperatures: [N] float32, above 0 where noisy; candidates have noise where it is above 0.
        seeds: [N] uint64, of noise as the next two.
        positions: [N] int32 position of the token to be sampled.
        sample_indices: [N] int32 index of the sample among its request's.
        masks: of these samples; None: they may take any token.
    """

    token_indices: np.ndarray
    modes: np.ndarray
    temperatures: np.ndarray
    seeds: np.ndarray
    positions: np.ndarray
    sample_indices: np.ndarray
    masks: SampleMasks | None = None

    @classmethod
    def plain(cls, after: np.ndarray, mode: int) -> StepSamples:
        """A sample without noise after each of these tokens of a step."""
        count = len(after)
        zeros = np.zeros(count, np.int32)
        return cls(
            token_indices=np.ascontiguousarray(after, np.int32),
            modes=np.full(count, mode, np.uint8),
            temperatures=np.ones(count, np.float32),
            seeds=np.zeros(count, np.uint64),
            positions=zeros,
            sample_indices=zeros,
        )

    def __post_init__(self) -> None:
        _check(self, _SAMPLES)
        assert len({len(getattr(self, name)) for name, _ in _SAMPLES}) == 1
        assert self.masks is None or len(self.masks.rows) == len(self.modes)


@dataclass(frozen=True, slots=True)
class Candidates:
    """The K likeliest tokens of each of N samples. Contiguous arrays.

    Attributes:
        tokens: [N, K] int32, best first, the lower token first where scores are equal.
        log_probs: [N, K] float32 log-softmax of the scores: the logits or, where the sample's
            temperature is above 0, logits / temperature + noise. The last bits depend on the number
            of threads.

    Where fewer than K tokens have a probability, and in a row with NaN or +infinity, the rest is
    token -1 with -infinity. Entries of samples in other modes stay as they were.
    """

    tokens: np.ndarray
    log_probs: np.ndarray

    def __post_init__(self) -> None:
        for array, kind in ((self.tokens, np.int32), (self.log_probs, np.float32)):
            assert array.dtype == kind and array.flags.c_contiguous, array.dtype
        assert self.tokens.shape == self.log_probs.shape and self.tokens.ndim == 2
        assert 1 <= self.tokens.shape[1] <= MOST_CANDIDATES, self.tokens.shape

    @classmethod
    def empty(cls, num_samples: int, count: int) -> Candidates:
        """Arrays [num_samples, count] without content."""
        shape = num_samples, count
        return cls(np.empty(shape, np.int32), np.empty(shape, np.float32))


@dataclass(frozen=True, slots=True)
class PreparedStep:
    """Arrays whose addresses the library has (`Executor.prepare`); keeps them alive."""

    struct: _Step
    arrays: tuple[object, ...]


def unsupported_reason(config: ModelConfig, dtype: torch.dtype) -> str | None:
    """Why the executor cannot run such a model, in one line; None if it can."""
    if config.rank.size > 1:
        return "it has no sums over ranks"
    family = model_class(config.architecture)
    if not issubclass(family, (LlamaForCausalLM, MixtralForCausalLM)):
        return f"{config.architecture} is not one of its families"
    if dtype not in _DTYPES:
        return f"{str(dtype).removeprefix('torch.')} is not one of its types"
    if config.head_dim % _LANES:
        return f"heads of {config.head_dim} are no multiple of {_LANES}"
    if config.hidden_act not in _ACTIVATIONS:
        return f"{config.hidden_act} is not one of its activations"
    if config.mlp_bias:
        return "it has no biases in the MLP"
    if config.attn_softcap is not None:
        return "it has no soft cap of attention scores"
    if config.alibi_slopes is not None:
        return "it has no ALiBi"
    own = _own_arithmetic(family, config)
    return None if own is None else f"{config.architecture} has {own} of its own"


def _own_arithmetic(family: type[DecoderLM], config: ModelConfig) -> str | None:
    """What a family computes differently from Llama or from the mixtures that the executor knows,
    in a word; None if nothing. Names and layout of checkpoints may differ: they do not matter
    after loading."""
    if family.norm_class is not DecoderLM.norm_class:
        return "norms"
    if family.attention_class(config) is not Attention or config.rope is None:
        return "attention"
    if family.make_layer is not DecoderLM.make_layer:
        return "layers"
    if family.make_mlp not in _MLP_MAKERS:
        return "an MLP"
    if family.logits is not DecoderLM.logits:
        return "logits"
    return None if family.embed is DecoderLM.embed else "embeddings"


def native_format(dtype: torch.dtype, weight_dtype: str) -> str:
    """The weight format for a model's type and `cpu_weight_dtype`."""
    return ("bf16", "float")[_DTYPES[dtype]] if weight_dtype == "auto" else weight_dtype


class Executor:
    """Owns the packed weights and a team of threads. One caller at a time.

    Each tensor of the model is emptied once the library has packed it, so that memory does not
    double: afterwards the module cannot run.

    Args:
        model: a module on the CPU for which `unsupported_reason` is None.
        config: its configuration.
        cache: the paged KV cache, float32 or bfloat16; read and written by steps.
        library: of `native.load`.
        threads: of the team, the caller included.
        cpus: one logical CPU per thread to pin it to (the caller, the first, is not pinned); None
            leaves placement to the operating system. CPUs of several NUMA nodes are a pool of
            threads for each node, see `topology.numa_pools`.
        weight_format: of `weight_forms.WEIGHT_FORMATS`; what a checkpoint has quantized stays as it
            is where the library has its form. The head of "int4" is int8.
        isa: level of csrc/step/isa.h; -1 for the machine's best.

    Raises:
        MemoryError: the library cannot allocate the packed weights.
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
        assert isinstance(model, DecoderLM) and config.rope is not None
        assert cache.shape.dtype in _DTYPES and cache.data.is_contiguous()
        assert threads >= 1 and (cpus is None or len(cpus) == threads), (threads, cpus)
        _declare(library)
        self._run = library.hetero_executor_step
        self._vocab_size = config.vocab_size
        sparse = _sparse_layers(model)
        sizes = _sizes(model, config, cache, sparse)
        forms = _forms(model, weight_format)
        windows = np.array([window or 0 for window in config.sliding_windows], np.int64)
        rotary = model.rotary.table.float().contiguous()
        pinned = None if cpus is None else np.array(cpus, np.int32)
        found = topology.numa_pools(cpus)
        pools = None if found is None else np.array(found, np.int32)
        if found is not None:
            text = "%d NUMA nodes: the threads of each compute the outputs whose weights it has"
            logger.info(text, found[-1] + 1)
        handle = library.hetero_executor_new(
            ctypes.byref(sizes),
            forms,
            cache.data.data_ptr(),
            cache.shape.block_size,
            windows.ctypes.data,
            rotary.data_ptr(),
            threads,
            None if pinned is None else pinned.ctypes.data,
            None if pools is None else pools.ctypes.data,
            isa,
        )
        if not handle:
            raise MemoryError("no memory for the packed weights")
        self._handle = handle
        self._library = library
        self._places = _adapter_places(model)
        self._adapter_dtype = torch.float32
        self._filled = np.zeros(0, bool)  # by adapter slot
        self._cache = cache  # the library reads and writes its memory
        self._free = weakref.finalize(self, library.hetero_executor_free, handle)
        self._watch = CoreWatch(partial(library.hetero_executor_slept, handle), threads)
        _hand_over(library, handle, model)

    def make_adapter_slots(self, count: int, dtype: torch.dtype) -> None:
        """Makes empty slots for adapters; once, before steps name any.

        Args:
            dtype: of A and B in the slots and of their inputs, bfloat16 or float32.
        """
        assert len(self._filled) == 0 and count > 0
        self._adapter_dtype, self._filled = dtype, np.zeros(count, bool)
        self._library.hetero_executor_make_slots(self._handle, count, _DTYPES[dtype])

    def fill_adapter_slot(self, slot: int, adapter: Adapter) -> None:
        """Packs an adapter into a slot, in the place of what it had, for the steps that follow.

        Raises:
            MemoryError: the library cannot allocate its packed form; the slot is empty then.
        """
        products: list[_AdapterProduct] = []
        parts: list[_AdapterPart] = []
        tensors: list[torch.Tensor] = []  # kept while the library reads them

        def address(tensor: torch.Tensor, dtype: torch.dtype) -> int:
            tensors.append(tensor.to(dtype).contiguous())
            return tensors[-1].data_ptr()

        own = self._adapter_dtype
        of_experts = (
            (*self._places[name], expert, linear)
            for name, experts in adapter.experts.items()
            for expert, linear in experts.items()
        )
        of_layers = ((*self._places[name], -1, one) for name, one in adapter.linears.items())
        for layer, product, expert, linear in (*of_layers, *of_experts):
            sizes = (layer, product, expert, *linear.a.shape, len(linear.parts))
            scales = address(linear.scales, torch.float32)
            products.append(_AdapterProduct(*sizes, address(linear.a, own), scales))
            for part in linear.parts:
                where = (part.first_row, len(part.b), part.first_rank, part.rank)
                parts.append(_AdapterPart(*where, address(part.b, own)))
        product_array = (_AdapterProduct * len(products))(*products)
        part_array = (_AdapterPart * len(parts))(*parts)
        given = _Adapter(
            len(products), ctypes.addressof(product_array), ctypes.addressof(part_array)
        )
        self._filled[slot] = False
        failed = self._library.hetero_executor_fill_slot(self._handle, slot, ctypes.byref(given))
        if failed == _NO_MEMORY:
            raise MemoryError(f"no memory for the packed form of adapter {adapter.ref.name!r}")
        assert not failed, (slot, adapter.ref.name)
        self._filled[slot] = True

    def step(self, inputs: StepInput, samples: StepSamples) -> np.ndarray:
        """Runs a step: K and V of its tokens go to the cache.

        Args:
            samples: of any mode but `CANDIDATES`.

        Returns:
            [N] int64 sampled tokens; those of `LOGITS_ONLY` samples mean nothing.
        """
        assert (samples.modes != CANDIDATES).all()
        tokens = np.empty(len(samples.modes), np.int64)
        self._call(inputs, samples, tokens)
        return tokens

    def prepare(
        self,
        inputs: StepInput,
        samples: StepSamples,
        tokens: np.ndarray,
        candidates: Candidates | None = None,
    ) -> PreparedStep:
        """Prepares many steps through the same arrays, which `run` reads and writes.

        Args:
            samples: if it has masks, every step's rows are -1 or rows of the masks' words.
            tokens: [N] int64, written where a sample is greedy or noisy.
            candidates: of N samples, written where one wants candidates; None if none ever does.
        """
        self._check_masks(samples.masks)
        step = _step(inputs, samples, tokens, candidates)
        return PreparedStep(step, (inputs, samples, tokens, candidates))

    def run(
        self,
        step: PreparedStep,
        num_tokens: int,
        num_sequences: int,
        num_samples: int,
        *,
        adapter_slots: np.ndarray | None = None,
    ) -> None:
        """Runs a step of the first entries of the prepared arrays; writes its results to them.

        Args:
            adapter_slots: see `StepInput`; those of the prepared arrays are not read.
        """
        struct = step.struct
        struct.adapter_slots = self._slots_address(adapter_slots)
        struct.num_tokens, struct.num_sequences = num_tokens, num_sequences
        struct.num_samples = num_samples
        self._watched(struct)

    def logits(self, inputs: StepInput, after: np.ndarray) -> torch.Tensor:
        """Runs a step without sampling.

        Args:
            after: [N] indices of tokens in the step.

        Returns:
            [N, vocab] float32 logits after these tokens.
        """
        samples = StepSamples.plain(after, LOGITS_ONLY)
        logits = torch.empty(len(after), self._vocab_size)
        self._call(inputs, samples, np.empty(0, np.int64), logits=logits)
        return logits

    def _call(
        self,
        inputs: StepInput,
        samples: StepSamples,
        tokens: np.ndarray,
        *,
        logits: torch.Tensor | None = None,
    ) -> None:
        trees = inputs.is_tree != 0
        if trees.any():
            counts = inputs.num_scheduled_tokens[trees]
            windows = (inputs.num_computed_tokens - inputs.bases)[trees] + counts
            assert ((counts <= windows) & (windows <= TREE_WINDOW)).all(), windows
        self._check_masks(samples.masks)
        if samples.masks is not None:
            assert (samples.masks.rows < len(samples.masks.words)).all()
        step = _step(inputs, samples, tokens, None)
        step.num_tokens, step.num_sequences = len(inputs.token_ids), len(inputs.request_slots)
        step.num_samples = len(samples.modes)
        step.adapter_slots = self._slots_address(inputs.adapter_slots)
        if logits is not None:
            step.logits = logits.data_ptr()
        self._watched(step)

    def _slots_address(self, slots: np.ndarray | None) -> int | None:
        """For the C struct; the caller keeps the array."""
        if slots is None:
            return None
        assert self._filled[slots[slots != NO_ADAPTER]].all(), "a step uses an empty slot"
        return int(slots.ctypes.data)

    def _check_masks(self, masks: SampleMasks | None) -> None:
        assert masks is None or masks.words.shape[1] == -(-self._vocab_size // 32)

    def _watched(self, step: _Step) -> None:
        begin = perf_counter()
        self._run(self._handle, ctypes.byref(step))
        self._watch.on_step(perf_counter() - begin)


def _step(
    inputs: StepInput, samples: StepSamples, tokens: np.ndarray, candidates: Candidates | None
) -> _Step:
    """The C struct over these arrays, with no token, sequence or sample yet."""
    found: tuple[int, int | None, int | None] = (0, None, None)
    if candidates is not None:
        assert len(candidates.tokens) == len(samples.modes)
        found = (
            candidates.tokens.shape[1],
            candidates.tokens.ctypes.data,
            candidates.log_probs.ctypes.data,
        )
    masks, pointers = samples.masks, (None, None)
    words = 0
    if masks is not None:
        words, pointers = masks.words.shape[1], (masks.rows.ctypes.data, masks.words.ctypes.data)
    return _Step(
        *(0, 0, 0, inputs.block_tables.shape[1], found[0], words),
        *(getattr(inputs, name).ctypes.data for name, _ in _INPUT),
        None,
        *(getattr(samples, name).ctypes.data for name, _ in _SAMPLES),
        *pointers,
        tokens.ctypes.data,
        *found[1:],
    )


def _declare(library: ctypes.CDLL) -> None:
    native.declare_functions(
        library,
        "hetero_executor_",
        {
            "new": (
                _POINTER,
                [_POINTER] * 3 + [_LONG] + [_POINTER] * 2 + [_LONG] + [_POINTER] * 2 + [_LONG],
            ),
            "slept": (_LONG, [_POINTER]),
            "free": (None, [_POINTER]),
            "set": (_LONG, [_POINTER] + [_LONG] * 3 + [_POINTER] + [_LONG] * 3),
            "set_quantized": (_LONG, [_POINTER] + [_LONG] * 3 + [_POINTER]),
            "make_slots": (None, [_POINTER, _LONG, _LONG]),
            "fill_slot": (_LONG, [_POINTER, _LONG, _POINTER]),
            "step": (None, [_POINTER, _POINTER]),
        },
    )


def _check(arrays: StepInput | StepSamples, types: tuple[tuple[str, type], ...]) -> None:
    for name, kind in types:
        array = getattr(arrays, name)
        assert array.dtype == kind and array.flags.c_contiguous, (name, array.dtype)


def _sizes(
    model: DecoderLM, config: ModelConfig, cache: PagedKVCache, sparse: np.ndarray
) -> _Model:
    assert config.rope is not None
    experts: tuple[int | None, ...] = (0, 0, 0, 0, 0, None)
    if isinstance(config, MixtralConfig):
        shared, renormalize = 0, True
        if isinstance(config, Qwen2MoeConfig):
            shared, renormalize = config.shared_expert_size, config.renormalize
        elif isinstance(config, Qwen3MoeConfig):
            renormalize = config.renormalize
        counts = (config.num_experts, config.experts_per_token, config.expert_size)
        experts = (*counts, shared, int(renormalize), sparse.ctypes.data)
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
        _ACTIVATIONS[config.hidden_act],
        int(config.qk_norm),
        int(cache.shape.dtype == torch.bfloat16),
        int(_is_tied(model)),
        *experts,
        config.norm_eps,
        config.attn_scale,
    )


def _sparse_layers(model: DecoderLM) -> np.ndarray:
    """[layers] uint8: whether a layer has experts."""
    layers = cast("Sequence[Any]", model.layers)
    return np.array([isinstance(layer.mlp, MixtralBlock) for layer in layers], np.uint8)


def _is_tied(model: DecoderLM) -> bool:
    """Whether the head's weight is the embedding's."""
    return model.lm_head.weight is model.embed_tokens.weight


def _forms(model: DecoderLM, weight_format: str) -> ctypes.Array[_Form]:
    """The forms of all matrices in the library's order. Logs which of them lose their own."""
    found: dict[tuple[int, int], _Form] = {}
    weights = []
    plain = native_format(cast(nn.Parameter, model.norm.weight).dtype, "auto")
    for layer, which, weight in _weights(model):
        if which in _ROUTERS:
            found[layer, which] = _struct_of(rounded_form(plain))
        elif which in _LAYER_MATRICES or which == _HEAD:
            weights.append(weight)
            own = (
                HEAD_FORMATS.get(weight_format, weight_format) if which == _HEAD else weight_format
            )
            found[layer, which] = _struct_of(form_of(weight, own))
    others = describe_others(weights)
    if others is not None:
        logger.warning(
            "the native executor has no form for %s: it holds these matrices as %s",
            others,
            weight_format,
        )
    layers = range(len(model.layers))
    forms = [found.get((layer, which), _Form()) for layer in layers for which in _LAYER_MATRICES]
    forms.append(found[_OUTSIDE_LAYERS, _HEAD])
    return (_Form * len(forms))(*forms)


def _struct_of(form: Form) -> _Form:
    return _Form(form.format, form.group, form.half_scales, form.zeros)


def _hand_over(library: ctypes.CDLL, handle: int, model: DecoderLM) -> None:
    """Packs every weight into the library, in the order in which steps read them; experts one by
    one."""
    tied = _is_tied(model)
    for layer, which, weight in _weights(model):
        if which in _EXPERTS:
            for expert in range(weight.shape[0]):
                _set(library, handle, (layer, which, expert), _expert(weight, expert))
        else:
            _set(library, handle, (layer, which, 0), _matrix(weight))
        if isinstance(weight, QuantizedWeight):
            weight.release()
        elif which != _EMBEDDING or not tied:  # the tied head is packed last, from the same tensor
            weight.data = weight.data.new_empty(0)


def _matrix(weight: nn.Parameter | QuantizedWeight) -> torch.Tensor | QuantizedMatrix:
    return weight.matrix if isinstance(weight, QuantizedWeight) else weight.data


def _expert(weight: nn.Parameter | QuantizedWeight, expert: int) -> torch.Tensor | QuantizedMatrix:
    assert isinstance(weight, (nn.Parameter, QuantizedStack))
    return weight[expert] if isinstance(weight, QuantizedStack) else weight.data[expert]


def _set(
    library: ctypes.CDLL,
    handle: int,
    place: tuple[int, int, int],
    weight: torch.Tensor | QuantizedMatrix,
) -> None:
    """`place`: layer, which and expert of `hetero_executor_set`."""
    if isinstance(weight, QuantizedMatrix):
        kept = None if place[1] in _ROUTERS else keep(weight)
        if kept is not None:
            tensors = (kept.data, kept.scales, kept.points, kept.offsets)
            addresses = (None if tensor is None else tensor.data_ptr() for tensor in tensors)
            given = _Quantized(*weight.shape, *addresses)
            failed = library.hetero_executor_set_quantized(handle, *place, ctypes.byref(given))
            assert not failed, (place, weight.shape, kept.form)
            return
        weight = dequantize(weight, torch.float32)
    data = weight.contiguous()
    rows, columns = data.shape if data.dim() == 2 else (1, len(data))
    failed = library.hetero_executor_set(
        handle, *place, data.data_ptr(), rows, columns, _DTYPES[data.dtype]
    )
    assert not failed, (place, tuple(data.shape))


_Weights = Iterator[tuple[int, int, nn.Parameter | QuantizedWeight]]


def _weights(model: DecoderLM) -> _Weights:
    """Layer, `which` of `hetero_executor_set` and weight, of all experts together."""
    yield _OUTSIDE_LAYERS, _EMBEDDING, model.embed_tokens.weight
    layers = cast("Sequence[Any]", model.layers)  # a module's attributes have no types
    for index, layer in enumerate(layers):
        attention = layer.attention
        yield index, _NORM, layer.attention_norm.weight
        yield from _linear(index, attention.qkv_proj, _QKV, _QKV_BIAS)
        if attention.heads.qk_norm is not None:
            yield index, _Q_NORM, attention.heads.qk_norm.q_weight
            yield index, _K_NORM, attention.heads.qk_norm.k_weight
        yield from _linear(index, attention.out_proj, _OUT, _OUT_BIAS)
        yield index, _SECOND_NORM, layer.mlp_norm.weight
        yield from _mlp_weights(index, layer.mlp)
    yield _OUTSIDE_LAYERS, _FINAL_NORM, cast(nn.Parameter, model.norm.weight)
    yield _OUTSIDE_LAYERS, _HEAD, model.lm_head.weight


def _mlp_weights(index: int, mlp: Any) -> _Weights:
    """Of a `GatedMLP` or a `MixtralBlock`."""
    dense, is_mixture = mlp, isinstance(mlp, MixtralBlock)
    if is_mixture:
        dense = getattr(mlp, "shared", None)
        yield index, _ROUTER, mlp.router.gate.weight
        if dense is not None:
            yield index, _SHARED_GATE, mlp.shared_gate.weight
        yield index, _EXPERTS_GATE_UP, mlp.experts.gate_up
        yield index, _EXPERTS_DOWN, mlp.experts.down
    if dense is not None:
        yield index, _GATE_UP, dense.gate_up_proj.weight
        yield index, _DOWN, dense.down_proj.weight


def _adapter_places(model: DecoderLM) -> dict[str, tuple[int, int]]:
    """Layer and `HeteroAdapterProduct.product` of each `Linear` and each weight of experts that
    adapters may name."""
    of_experts = {_EXPERTS_GATE_UP: _GATE_UP, _EXPERTS_DOWN: _DOWN}
    own = {
        id(weight): (layer, _ADAPTED.index(of_experts.get(which, which)))
        for layer, which, weight in _weights(model)
        if of_experts.get(which, which) in _ADAPTED
    }
    weights = {
        name: module.weight for name, module in model.named_modules() if isinstance(module, Linear)
    }
    for name, module in model.named_modules():
        if isinstance(module, Experts):
            weights |= {f"{name}.gate_up": module.gate_up, f"{name}.down": module.down}
    return {name: own[id(weight)] for name, weight in weights.items() if id(weight) in own}


def _linear(layer: int, linear: Linear, weight: int, bias: int) -> _Weights:
    yield layer, weight, linear.weight
    if linear.bias is not None:
        yield layer, bias, linear.bias
