"""Builds a model, matches names and shapes of its stored tensors, and fills it with weights.

`folders.py` finds the folder, `weight_files.py` the files; `weight_reader.py` copies the bytes.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import numpy as np
import torch
from torch import Tensor
from tqdm import tqdm

from hetero_llm.core.errors import ConfigError, ModelLoadError
from hetero_llm.models.blocks import DecoderLM
from hetero_llm.models.collectives import ONE_RANK, Collectives, Rank
from hetero_llm.models.config import ModelConfig
from hetero_llm.models.config_reader import short_reason
from hetero_llm.models.configs.transformers import TransformersConfig
from hetero_llm.models.dummy_weights import fill_randomly
from hetero_llm.models.experts import Experts, HostMemory, SettlingMemory, stay
from hetero_llm.models.folders import LOAD_FORMATS, resolve_model_folder
from hetero_llm.models.gguf.container import is_gguf
from hetero_llm.models.kv_scales import stored_kv_scales
from hetero_llm.models.layers import CausalLM, Linear, RearrangedView
from hetero_llm.models.quantization_config import checkpoint_format
from hetero_llm.models.quantized_slices import matrix_slices
from hetero_llm.models.quantized_weights import (
    LayerWeight,
    MatrixFiller,
    MatrixPlan,
    RandomWeightQuantizer,
    Stored,
    place_experts,
    plan_matrices,
    stored_bytes,
    weights_of,
)
from hetero_llm.models.rank_config import (
    FIELD,
    STAGES_FIELD,
    first_kv_head,
    sharded_config,
    stage_config,
)
from hetero_llm.models.rank_slices import RankSlice, RankSlices
from hetero_llm.models.registry import model_class
from hetero_llm.models.sharding import Cut, RankParts, check_ranks, join_ranks, rank_parts
from hetero_llm.models.weight_files import StoredTensor, WeightFile, find_weight_files
from hetero_llm.models.weight_reader import (
    Piece,
    ReadAhead,
    copy_pieces,
    pieces_of,
    pieces_of_slice,
)
from hetero_llm.quantization.formats.fp8 import is_unused_scale
from hetero_llm.quantization.formats.kv_cache import kv_scale_of
from hetero_llm.quantization.formats.scheme import CheckpointFormat
from hetero_llm.quantization.names import ONLINE_BYTES
from hetero_llm.utils.topology import usable_memory_bytes

__all__ = ["LOAD_FORMATS", "default_dtype", "load_model", "resolve_model_folder"]

logger = logging.getLogger(__name__)

_NAMES_SHOWN = 5
_HEADS = ("lm_head.weight", "embed_out.weight", "output.weight", "output_layer.weight")
"""Last parts of the names under which families store their head."""
_SAMPLES, _SAMPLE_BYTES = 64, 1024


# large: half of it says what the arguments are.
def load_model(
    folder: Path,
    config: ModelConfig,
    *,
    dtype: torch.dtype,
    device: torch.device | str,
    show_progress: bool,
    load_format: str = "auto",
    allow_pickle: bool = False,
    seed: int = 0,
    build: Callable[[ModelConfig], CausalLM] | None = None,
    collectives: Collectives = ONE_RANK,
    expert_memory: HostMemory | None = None,
) -> CausalLM:
    """Builds the model of `config` and fills it from the folder's weight files.

    With several ranks it is this rank's part: modules of `sharded_config`, of whose weights only
    the rank's slices are read, and of a stage only the tensors of its layers. All ranks call this
    function at the same time.

    Peak memory is the model and what `weight_reader` reads ahead: at most a 20th of the model, or
    8 MiB; with a `RearrangedView`, also one stored tensor.

    Args:
        folder: Of `resolve_model_folder`.
        config: Of `load_model_config`; that of the whole model.
        dtype: Of every parameter; stored tensors are converted.
        device: Where the parameters live.
        show_progress: A progress bar in bytes on stderr.
        load_format: Of `LOAD_FORMATS`.
        allow_pickle: Whether pickled files may be read; only tensors are unpickled.
        seed: Of the random weights of "dummy".
        build: Makes the model; None: the class of `config.architecture`.
        collectives: Of the ranks that run the model together.
        expert_memory: Gives memory to the weights of all `Experts`, which have none on `device`;
            quantized ones pass through it. None: they are as all others.

    Returns:
        The model in eval mode, parameters without gradients.

    Raises:
        ConfigError: `load_format` is unknown, or needs `allow_pickle`.
        ModelLoadError: Files are missing, damaged, or do not match `config`; the message names
            them. Weights that are not finite are a warning.
    """
    if load_format not in LOAD_FORMATS:
        raise ConfigError("load_format", load_format, "one of " + ", ".join(LOAD_FORMATS))
    folder = Path(folder)
    rank = collectives.rank
    _check_build(config, build, rank)
    build = build or model_class(config.architecture)
    files: tuple[WeightFile, ...] | None = None
    if load_format != "dummy":
        keep_blocks = config.quantization is not None
        files = find_weight_files(
            folder, load_format, allow_pickle=allow_pickle, keep_blocks=keep_blocks
        )
        _check_sizes(folder, config, files)
    wanted = checkpoint_format(config, folder)
    staged, own_config = stage_config(config, rank), sharded_config(config, rank)
    blueprint = _plan(
        folder, (config, staged, own_config), files, dtype, torch.device(device), build, wanted
    )
    context = weights_of(blueprint.plans, experts_apart=expert_memory is not None)
    with default_dtype(dtype), torch.device(device), context as weights:
        model = _build(build, own_config)
    if expert_memory is not None:
        assert rank.is_whole or not isinstance(expert_memory, SettlingMemory)
        place_experts(weights, blueprint.plans, expert_memory)
    settles = {} if expert_memory is None else _settles(weights, blueprint.plans)
    model.eval().requires_grad_(False)
    if files is not None and config.quantization is not None:
        model.kv_scales = _own_kv_scales(
            stored_kv_scales(files, config, blueprint.checkpoint_name), config, own_config
        )
    parts = _joined(model, staged, collectives)
    cuts = _cuts_of_weights(model, weights, parts)
    filler = MatrixFiller(
        blueprint.plans, weights, dtype=dtype, device=torch.device(device),
        cuts=cuts, slices=matrix_slices(blueprint.plans, weights, cuts, blueprint.stored),
    )  # fmt: skip
    if files is None:
        if wanted is None:
            fill_randomly(model, seed, parts, filled=lambda one: _settle(settles, one))
        else:
            quantizer = RandomWeightQuantizer(model, weights, wanted)
            leave = _settling_quantized(settles, weights, quantizer, expert_memory)
            fill_randomly(model, seed, parts, filled=leave)
            quantizer.quantize_others()
    else:
        matches = _matches_of_rank(model, blueprint, parts, folder, files, filler)
        _fill_from_files(folder, matches, filler, dtype, show_progress, settles)
    return model


Settles = Mapping[int, Callable[[], None]]
"""What is called when a plain weight is filled, by the address of its memory."""


def _settles(weights: Sequence[LayerWeight], plans: Sequence[MatrixPlan]) -> Settles:
    """Of weights of experts that go on from where they were read to."""
    planned = {plan.weight for plan in plans}
    return {
        weight.parameter.data_ptr(): partial(weight.layer.settle, weight.layer, weight.name)
        for place, weight in enumerate(weights)
        if place not in planned
        and isinstance(weight.layer, Experts)
        and weight.layer.settle is not stay
    }


def _settle(settles: Settles, filled: Tensor) -> None:
    """A whole weight has been filled."""
    then = settles.get(filled.data_ptr())
    if then is not None:
        then()


def _settling_quantized(
    settles: Settles,
    weights: Sequence[LayerWeight],
    quantizer: RandomWeightQuantizer,
    memory: HostMemory | None,
) -> Callable[[Tensor], None]:
    """What is called with each plain random weight: one that settles is quantized before, so that
    there are no more plain ones than this at a time."""
    places = {
        weight.parameter.data_ptr(): place
        for place, weight in enumerate(weights)
        if weight.parameter.data_ptr() in settles
    }

    def leave(filled: Tensor) -> None:
        place = places.get(filled.data_ptr())
        if place is None:
            return
        if quantizer.quantize(place):
            assert isinstance(memory, SettlingMemory)
            memory.give_back(filled)
        else:
            _settle(settles, filled)

    return leave


def _check_build(
    config: ModelConfig, build: Callable[[ModelConfig], CausalLM] | None, rank: Rank
) -> None:
    """Raises ConfigError: several ranks cannot run what `load_model` builds."""
    check_ranks(config, rank.size, rank.stages)
    if not rank.is_whole and build is not None:
        reason = "a model without its language model's head runs on one rank"
        field, size = (FIELD, rank.size) if rank.size > 1 else (STAGES_FIELD, rank.stages)
        raise ConfigError(field, size, reason)


def _build(build: Callable[[ModelConfig], CausalLM], config: ModelConfig) -> CausalLM:
    """The model of a configuration, without the modules of other stages."""
    model = build(config)
    if config.rank.stages > 1:
        assert isinstance(model, DecoderLM)
        model.leave_out_other_stages()
    return model


def _joined(model: CausalLM, whole: ModelConfig, collectives: Collectives) -> RankParts:
    """Lets a rank's model return the sums of all ranks; what it has of the whole one, or of the
    stage."""
    if collectives.rank.size == 1:
        return RankParts({}, frozenset())
    assert isinstance(model, DecoderLM)
    join_ranks(model, collectives)
    return rank_parts(model, whole)


def _own_kv_scales(scales: Tensor | None, whole: ModelConfig, own: ModelConfig) -> Tensor | None:
    """Those of a rank's layers and KV heads; `scales`: see `stored_kv_scales`."""
    if scales is None:
        return None
    of_layers = scales.narrow(0, own.first_layer, own.num_layers)
    return of_layers.narrow(2, first_kv_head(whole, own.rank), own.num_kv_heads).contiguous()


def _cuts_of_weights(
    model: CausalLM, weights: Sequence[LayerWeight], parts: RankParts
) -> dict[int, Cut]:
    """The cut of each weight that ranks have parts of, by its place among `weights`."""
    if not parts.cuts:  # a model that one rank runs may have dropped the head that it made first
        return {}
    paths = {id(module): path for path, module in model.named_modules()}
    # A stage may have left out the head that it made.
    names = (f"{paths.get(id(weight.layer))}.{weight.name}" for weight in weights)
    return {place: parts.cuts[name] for place, name in enumerate(names) if name in parts.cuts}


def _zero_added(model: CausalLM, parts: RankParts) -> None:
    """Biases that rank 0 adds are zero on the others."""
    if model.config.rank.index:
        for name, parameter in model.named_parameters():
            if name in parts.added:
                parameter.zero_()


def _matches_of_rank(
    model: CausalLM,
    blueprint: _Blueprint,
    parts: RankParts,
    folder: Path,
    files: tuple[WeightFile, ...],
    filler: MatrixFiller,
) -> list[_Match]:
    """`_matches`; of several ranks with the rank's slice of each plain tensor in the place of its
    target."""
    rank = model.config.rank
    if rank.size == 1:
        return _matches(model, folder, files, filler, compares=True)
    assert isinstance(model, DecoderLM) and isinstance(blueprint.whole, DecoderLM)
    _zero_added(model, parts)
    slices = RankSlices(blueprint.whole, model, parts)
    return [
        replace(match, target=slices.of(match.target))
        if isinstance(match.target, Tensor | RearrangedView)
        else match
        for match in _matches(blueprint.whole, folder, files, filler, compares=rank.index == 0)
    ]


def quantized_sizes(
    folder: Path,
    config: ModelConfig,
    *,
    dtype: torch.dtype,
    load_format: str = "auto",
    allow_pickle: bool = False,
    rank: Rank = ONE_RANK.rank,
) -> dict[int, int]:
    """Bytes of each quantized weight that `load_model` will make, by the place of its `Linear` in
    the order in which the model creates them: of checkpoints as stored, which differs by a few
    percent from the form in memory. Arguments and errors are those of `load_model`.

    Args:
        rank: whose part of the weights counts.
    """
    wanted = checkpoint_format(config, folder)
    if wanted is None:
        return {}
    with default_dtype(dtype), torch.device("meta"), weights_of() as weights:
        model = model_class(config.architecture)(config)
    linears = [place for place, one in enumerate(weights) if isinstance(one.layer, Linear)]
    order = {place: index for index, place in enumerate(linears)}  # experts are left out
    with default_dtype(dtype), torch.device("meta"), weights_of() as parts:
        model_class(config.architecture)(sharded_config(config, rank))
    own = [one.parameter.numel() for one in parts]
    share = 1.0 if config.online_quantization is None else ONLINE_BYTES[config.online_quantization]
    if load_format == "dummy":
        if config.online_quantization is None:  # MXFP4, whose linear layers are plain
            return {}
        return {order[one]: int(own[one] * share) for one in linears}
    files = find_weight_files(folder, load_format, allow_pickle=allow_pickle, keep_blocks=True)
    sizes = _planned_bytes(folder, model, weights, files, wanted)
    return {
        order[place]: size * own[place] // weights[place].parameter.numel()
        for place, size in sizes.items()
        if place in order
    }


def _planned_bytes(
    folder: Path,
    model: CausalLM,
    weights: Sequence[LayerWeight],
    files: tuple[WeightFile, ...],
    wanted: CheckpointFormat,
) -> dict[int, int]:
    """Bytes of the quantized matrices of each weight, by its place among `weights`: as stored, or
    those that plain ones become."""
    online = model.config.online_quantization
    stored, _ = _stored_tensors(model, folder, files)
    sizes: dict[int, int] = {}
    for plan in plan_matrices(model, weights, wanted, stored):
        size = stored_bytes(plan, stored)
        if online is not None:
            size = int(plan.rows * plan.columns * ONLINE_BYTES[online])
        sizes[plan.weight] = sizes.get(plan.weight, 0) + size
    return sizes


@dataclass(frozen=True, slots=True)
class ExpertSizes:
    """Bytes of the weights of a mixture, quantized ones as stored.

    Attributes:
        num_layers: layers that have experts; 0: the model is no mixture.
        num_experts: of the first of them.
        expert_bytes: of one expert, on average.
        kept_bytes: of them, scales: what is not the numbers of its matrices.
        other_bytes: of all other weights, tables included.
    """

    num_layers: int
    num_experts: int
    expert_bytes: int
    other_bytes: int
    kept_bytes: int = 0


def expert_sizes(
    folder: Path,
    config: ModelConfig,
    *,
    dtype: torch.dtype,
    load_format: str = "auto",
    allow_pickle: bool = False,
    rank: Rank = ONE_RANK.rank,
) -> ExpertSizes:
    """Sizes of what `load_model` will make. Arguments and errors are those of `load_model`.

    Args:
        rank: whose part of the weights counts; of one stage.
    """
    if isinstance(config, TransformersConfig):
        return ExpertSizes(0, 0, 0, 0)
    model, weights = _without_memory(sharded_config(config, rank), dtype)
    own = [weight.parameter for weight in weights]
    layers = [module for module in model.modules() if isinstance(module, Experts)]
    sizes = [parameter.nbytes for parameter in own]
    total = sum(tensor.nbytes for tensor in (*model.parameters(), *model.buffers()))
    rest = total - sum(sizes)
    if not layers:
        return ExpertSizes(0, 0, 0, total)
    wanted, online = checkpoint_format(config, folder), config.online_quantization
    if load_format != "dummy" and wanted is not None:
        files = find_weight_files(folder, load_format, allow_pickle=allow_pickle, keep_blocks=True)
        if rank.size > 1:  # files have whole weights
            model, weights = _without_memory(config, dtype)
        for place, size in _planned_bytes(folder, model, weights, files, wanted).items():
            sizes[place] = size * own[place].numel() // weights[place].parameter.numel()
    elif online is not None:
        sizes = [int(parameter.numel() * ONLINE_BYTES[online]) for parameter in own]
    elif wanted is not None:  # random weights of MXFP4: 4 bits, and a scale of 16 for 32 numbers
        for place, weight in enumerate(weights):
            if isinstance(weight.layer, Experts):
                sizes[place] = own[place].numel() * 9 // 16
    experts = sum(
        size
        for size, weight in zip(sizes, weights, strict=True)
        if isinstance(weight.layer, Experts)
    )
    count = layers[0].down.shape[0]
    each = -(-experts // (len(layers) * count))
    numbers = layers[0].gate_up[0].numel() + layers[0].down[0].numel()
    # Of the types that weights have, the largest whose numbers are no more than there are bytes.
    data = next(n for n in (numbers * dtype.itemsize, numbers, numbers // 2, 0) if n <= each)
    return ExpertSizes(len(layers), count, each, rest + sum(sizes) - experts, each - data)


def _without_memory(config: ModelConfig, dtype: torch.dtype) -> tuple[CausalLM, list[LayerWeight]]:
    """A model on torch's "meta" device, and its weights in the order in which it makes them."""
    with default_dtype(dtype), torch.device("meta"), weights_of() as weights:
        model = model_class(config.architecture)(config)
    return model, weights


def _check_sizes(folder: Path, config: ModelConfig, files: tuple[WeightFile, ...]) -> None:
    """Refuses sizes in config.json that the weight files cannot fill, before even modules without
    memory are built from them.

    Raises:
        ModelLoadError: There are fewer tensors than layers, or fewer numbers than the embedding
            alone has.
    """
    tensors = [stored for file in files for stored in file.tensors]
    numbers = sum(math.prod(stored.shape) for stored in tensors)
    if config.num_layers > len(tensors):
        said, held = f"{config.num_layers} layers", f"{len(tensors)} tensors"
    elif config.vocab_size * config.word_embed_size > numbers:
        said = f"an embedding of {config.vocab_size} x {config.word_embed_size}"
        held = f"{numbers} numbers"
    else:
        return
    where = _config_of(folder)
    raise ModelLoadError(f"{folder}: {where} says {said}, the weight files hold {held}")


def _config_of(folder: Path) -> str:
    """Where a model says what it is, in words."""
    return "its metadata" if is_gguf(folder) else "config.json"


@dataclass(frozen=True, slots=True)
class _Blueprint:
    """Attributes:
    plans: the quantized matrices of the files.
    stored: their tensors, by the names that the model knows.
    whole: the whole model, or the whole of this stage, without memory; None: of a class of
        transformers.
    checkpoint_name: of the whole model, layers of all stages included.
    """

    plans: tuple[MatrixPlan, ...]
    stored: Stored
    whole: CausalLM | None
    checkpoint_name: Callable[[str], str | None]


def _plan(
    folder: Path,
    configs: tuple[ModelConfig, ModelConfig, ModelConfig],
    files: tuple[WeightFile, ...] | None,
    dtype: torch.dtype,
    device: torch.device,
    build: Callable[[ModelConfig], CausalLM],
    wanted: CheckpointFormat | None,
) -> _Blueprint:
    """Builds the model on torch's meta device and compares it with the weight files and with the
    free host memory, so that a wrong or hostile config.json costs no memory.

    Classes of transformers are left out: their code may need real tensors.

    Args:
        configs: Of the whole model, of the stage, and of this rank's part.
        files: None for random weights.

    Raises:
        ModelLoadError: The model cannot be built, differs from the files, or does not fit.
    """
    config, staged, own_config = configs
    if isinstance(config, TransformersConfig):
        return _Blueprint((), {}, None, lambda name: name)
    model, weights = _on_meta(folder, config, dtype, build)
    checkpoint_name = model.checkpoint_name
    plans, stored = _checked(model, weights, folder, files, dtype, device, wanted)
    if staged.rank.stages > 1:
        model, weights = _on_meta(folder, staged, dtype, build)
        plans, stored = _checked(model, weights, folder, files, dtype, device, wanted)
    own, own_weights = model, weights
    if own_config.rank.size > 1:
        own, own_weights = _on_meta(folder, own_config, dtype, build)
    if device.type == "cpu":
        needed = sum(tensor.nbytes for tensor in (*own.parameters(), *own.buffers()))
        needed -= sum(own_weights[one].parameter.nbytes for one in {p.weight for p in plans})
        needed += sum(stored_bytes(plan, stored) for plan in plans) // own_config.rank.size
        free = usable_memory_bytes()
        if needed > free:
            raise ModelLoadError(
                f"{folder}: the model needs {_gib(needed)} of host memory, tables for a context of "
                f"{config.max_model_len} tokens included, and {_gib(free)} are free"
            )
    return _Blueprint(plans, stored, model, checkpoint_name)


def _checked(
    model: CausalLM,
    weights: Sequence[LayerWeight],
    folder: Path,
    files: tuple[WeightFile, ...] | None,
    dtype: torch.dtype,
    device: torch.device,
    wanted: CheckpointFormat | None,
) -> tuple[tuple[MatrixPlan, ...], dict[str, tuple[WeightFile, StoredTensor]]]:
    """Compares a model without memory with the weight files: `plans` and `stored` of a
    `_Blueprint`, both empty without files."""
    if files is None:
        return (), {}
    stored, _ = _stored_tensors(model, folder, files)
    try:
        plans = plan_matrices(model, weights, wanted, stored)
    except ModelLoadError as error:
        raise ModelLoadError(f"{folder}: {error}") from error
    _matches(model, folder, files, MatrixFiller(plans, weights, dtype=dtype, device=device))
    return plans, stored


def _on_meta(
    folder: Path,
    config: ModelConfig,
    dtype: torch.dtype,
    build: Callable[[ModelConfig], CausalLM],
) -> tuple[CausalLM, list[LayerWeight]]:
    """The model without memory, and its weights.

    Raises:
        ModelLoadError: It cannot be built.
    """
    try:
        with default_dtype(dtype), torch.device("meta"), weights_of() as weights:
            return _build(build, config).requires_grad_(False), weights
    except (ArithmeticError, ValueError, RuntimeError) as error:
        reason = short_reason(error)
        raise ModelLoadError(
            f"{folder}: {_config_of(folder)}: no such model can be built: {reason}"
        ) from error


def _gib(size: int) -> str:
    return f"{size / 2**30:.1f} GiB"


@contextmanager
def default_dtype(dtype: torch.dtype) -> Iterator[None]:
    """Sets torch's default dtype inside the context."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


@dataclass(frozen=True, slots=True)
class _Match:
    """A stored tensor under the model's name and its target, or what a rank reads of it; None: it
    is part of a quantized matrix."""

    name: str
    file: WeightFile
    stored: StoredTensor
    target: Tensor | RearrangedView | RankSlice | None

    @property
    def nbytes(self) -> int:
        """Of what is read, as stored."""
        if not isinstance(self.target, RankSlice):
            return self.stored.nbytes
        assert self.stored.dtype is not None
        return self.target.numel * self.stored.dtype.itemsize


def _fill_from_files(
    folder: Path,
    matches: Sequence[_Match],
    filler: MatrixFiller,
    dtype: torch.dtype,
    show_progress: bool,
    settles: Settles,
) -> None:
    """Fills the targets; names and shapes of all files are checked by now."""
    arrivals = _Arrivals(matches, settles)
    total = sum(
        filler.nbytes(match.name, match.stored) if match.target is None else match.nbytes
        for match in matches
    )
    ahead = ReadAhead.of(total)
    with tqdm(
        total=total, unit="B", unit_scale=True, desc="loading weights", disable=not show_progress
    ) as bar:
        not_finite = copy_pieces(
            (
                piece
                for match in matches
                for piece in arrivals.counted(match, _pieces(match, filler, ahead.piece_bytes))
            ),
            ahead,
            lambda piece: bar.update(piece.nbytes),
        )
    if not_finite:
        logger.warning(
            "%s: weights that are no finite numbers (NaN, or infinite as %s): %s",
            folder, str(dtype).removeprefix("torch."), _some(not_finite),
        )  # fmt: skip


class _Arrivals:
    """Counts the stored tensors of each weight that settles, and settles it behind the last one."""

    def __init__(self, matches: Sequence[_Match], settles: Settles) -> None:
        self._settles = settles
        self._missing: dict[int, int] = {}
        for match in matches:
            key = self._key(match)
            if key is not None:
                self._missing[key] = self._missing.get(key, 0) + 1

    def counted(self, match: _Match, pieces: Iterator[Piece]) -> Iterator[Piece]:
        """The pieces of a match, the last of which counts it as arrived."""
        key = self._key(match)
        if key is None:
            yield from pieces
            return
        *others, last = pieces
        yield from others
        yield replace(last, then=partial(self._arrive, key, last.then))

    def _key(self, match: _Match) -> int | None:
        target = match.target
        view = target.view if isinstance(target, RearrangedView) else target
        if not self._settles or not isinstance(view, Tensor) or view.is_meta:
            return None
        key = view.untyped_storage().data_ptr()
        return key if key in self._settles else None

    def _arrive(self, key: int, then: Callable[[], None] | None) -> None:
        if then is not None:
            then()
        self._missing[key] -= 1
        if self._missing[key] == 0:
            self._settles[key]()


def _pieces(match: _Match, filler: MatrixFiller, piece_bytes: int) -> Iterator[Piece]:
    """Cuts a stored tensor into pieces that fill its target, or memory of the filler."""
    if isinstance(match.target, RankSlice):
        yield from match.target.pieces(match.file, match.stored, piece_bytes=piece_bytes)
        return
    if match.target is not None:
        yield from pieces_into(match.file, match.stored, match.target, piece_bytes=piece_bytes)
        return
    taken = filler.take(match.name, match.stored)
    if taken is None:
        return
    target = taken.tensor
    if not target.dim():
        target, taken_of = target.view(1), replace(match.stored, shape=(1,))
    else:
        taken_of = match.stored
    *pieces, last = pieces_of_slice(
        match.file, taken_of, target,
        dim=taken.dim, runs=taken.runs, dtype=target.dtype, piece_bytes=piece_bytes,
    )  # fmt: skip
    yield from pieces
    yield replace(last, then=taken.then)


def pieces_into(
    file: WeightFile, stored: StoredTensor, target: Tensor | RearrangedView, *, piece_bytes: int
) -> Iterator[Piece]:
    """Cuts a stored tensor into pieces that fill its target; see `pieces_of`."""
    if isinstance(target, Tensor):
        dtype = target.dtype
        yield from pieces_of(file, stored, target, dtype=dtype, piece_bytes=piece_bytes)
        return
    # The whole tensor is copied to the parameter's device first and rearranged there.
    dtype, device = target.view.dtype, target.view.device
    whole = torch.empty(target.shape, dtype=stored.dtype, device=device)
    *pieces, last = pieces_of(file, stored, whole, dtype=dtype, piece_bytes=piece_bytes)
    yield from pieces
    yield replace(last, then=partial(target.fill, whole))


def _stored_tensors(
    model: CausalLM, folder: Path, files: tuple[WeightFile, ...]
) -> tuple[dict[str, tuple[WeightFile, StoredTensor]], list[tuple[WeightFile, StoredTensor]]]:
    """The stored tensors by the names that the model knows, and those that it skips or leaves to
    another stage."""
    found: dict[str, tuple[WeightFile, StoredTensor]] = {}
    skipped: list[tuple[WeightFile, StoredTensor]] = []
    for file in files:
        for stored in file.tensors:
            ours = model.checkpoint_name(stored.name)
            if ours is None or not model.in_stage(ours):
                skipped.append((file, stored))
            elif ours in found:
                first = found[ours][0].path.name
                raise ModelLoadError(
                    f"{folder}: {ours} is stored twice, in {first} and {file.path.name}"
                )
            else:
                found[ours] = (file, stored)
    return found, skipped


def _matches(
    model: CausalLM,
    folder: Path,
    files: tuple[WeightFile, ...],
    filler: MatrixFiller,
    *,
    compares: bool = False,
) -> list[_Match]:
    """One match for each stored tensor of the model, in the order of the files' bytes. Names and
    shapes of all files are checked, so that a wrong folder fails at once.

    Args:
        compares: Warns of a stored head that is not the embedding that it is tied to.
    """
    targets = filler.without_matrices(model.checkpoint_tensors())
    stored_tensors, skipped = _stored_tensors(model, folder, files)
    found: dict[str, _Match] = {}
    unexpected: list[str] = []
    quantization = model.config.quantization

    def is_plain(name: str) -> bool:
        return name in targets and name in stored_tensors and stored_tensors[name][1].is_plain

    for name, (file, stored) in stored_tensors.items():
        if name in targets or filler.claims(name):
            found[name] = _Match(name, file, stored, targets.get(name))
        elif quantization is None or (
            kv_scale_of(stored.name) is None and not is_unused_scale(quantization, name, is_plain)
        ):
            unexpected.append(stored.name)
    _use_tied_head(model, targets, found, skipped, compares)
    problems = {
        "missing": [name for name in targets if name not in found],
        "unexpected": unexpected,
        "of wrong shape": _wrong_shapes(found, model.config, _config_of(folder)),
        "of a type that cannot be loaded": [
            f"{match.stored.name} ({match.stored.type_name})"
            for match in found.values()
            if match.target is not None and not match.stored.is_plain
        ],
    }
    lines = [f"tensors {kind}: {_some(names)}" for kind, names in problems.items() if names]
    if lines:
        raise ModelLoadError(f"{folder}: " + "; ".join(lines))
    order = {id(file): index for index, file in enumerate(files)}
    return sorted(found.values(), key=lambda match: (order[id(match.file)], match.stored.start))


def _use_tied_head(
    model: CausalLM,
    targets: Mapping[str, Tensor | RearrangedView],
    found: dict[str, _Match],
    skipped: list[tuple[WeightFile, StoredTensor]],
    compares: bool,
) -> None:
    """Handles checkpoints that store a tied head: uses it if the embedding is not stored, and warns
    if both are stored and differ (`compares`)."""
    name = _tied_embedding(model, targets)
    if name is None:
        return
    shape = tuple(targets[name].shape)
    heads = [
        (file, stored)
        for file, stored in skipped
        if stored.name.endswith(_HEADS) and stored.shape == shape
    ]
    if not heads:
        return
    file, head = heads[0]
    if name not in found:
        found[name] = _Match(name, file, head, targets[name])
    elif compares and _differ(found[name], file, head):
        logger.warning(
            "%s: %s is not %s, but config.json ties them and the second one serves as both; "
            "tie_word_embeddings=false there keeps them apart",
            file.path, head.name, found[name].stored.name,
        )  # fmt: skip


def _tied_embedding(model: CausalLM, targets: Mapping[str, Tensor | RearrangedView]) -> str | None:
    """The name of the embedding that is also the head; None if there is none."""
    head = getattr(getattr(model, "lm_head", None), "weight", None)
    if not isinstance(head, Tensor) or not model.config.tie_word_embeddings:
        return None
    for name, target in targets.items():
        view = target.view if isinstance(target, RearrangedView) else target
        if view.shape == head.shape and view.data_ptr() == head.data_ptr():
            return name
    return None


def _differ(embedding: _Match, file: WeightFile, head: StoredTensor) -> bool:
    """Whether two stored tensors differ in samples spread over them."""
    stored = embedding.stored
    if stored.dtype is None or (stored.dtype, stored.shape) != (head.dtype, head.shape):
        return False  # reported elsewhere, or not comparable byte by byte
    size = min(_SAMPLE_BYTES, stored.nbytes)
    ours, theirs = np.empty(size, np.uint8), np.empty(size, np.uint8)
    opened = {id(one): one for one in (embedding.file, file)}.values()
    try:
        for one in opened:
            one.open()
        for offset in np.linspace(0, stored.nbytes - size, _SAMPLES, dtype=np.int64).tolist():
            embedding.file.read(stored, offset, ours)
            file.read(head, offset, theirs)
            if not np.array_equal(ours, theirs):
                return True
    finally:
        for one in opened:
            one.close()
    return False


def _wrong_shapes(found: Mapping[str, _Match], config: ModelConfig, where: str) -> list[str]:
    """Messages; `where`: what says the shapes that are needed."""
    wrong = []
    for match in found.values():
        if match.target is None:
            continue
        stored, needed = match.stored, tuple(match.target.shape)
        if stored.shape == needed:
            continue
        if needed[:1] == (config.vocab_size,) and stored.shape[1:] == needed[1:]:
            # Cutting or padding would be a guess about added tokens; vLLM refuses both, too.
            rows = stored.shape[0] if stored.shape else 0
            wrong.append(
                f"{stored.name} has {rows} rows, {where} says vocab_size={config.vocab_size}"
            )
        else:
            shape = list(stored.shape)
            wrong.append(f"{stored.name} is {shape}, {where} says {list(needed)}")
    return wrong


def _some(names: list[str]) -> str:
    more = len(names) - _NAMES_SHOWN
    return ", ".join(names[:_NAMES_SHOWN]) + (f" and {more} more" if more > 0 else "")
