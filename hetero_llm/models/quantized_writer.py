"""Writes a quantized copy of a checkpoint. One tensor and one file of output are in memory; with
texts to calibrate with, also the plain model and all quantized matrices."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Container, Iterable, Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch
from safetensors.torch import save_file
from torch import Tensor
from tqdm import tqdm

from hetero_llm.core.errors import ConfigError, ModelLoadError
from hetero_llm.models.calibration import quantize_with_texts
from hetero_llm.models.config import ModelConfig
from hetero_llm.models.config_reader import read_json
from hetero_llm.models.experts import Experts
from hetero_llm.models.folders import PICKLED, SAFETENSORS
from hetero_llm.models.layers import BankView, CausalLM, Linear
from hetero_llm.models.loader import default_dtype, load_model
from hetero_llm.models.quantized_weights import (
    LayerWeight,
    MatrixPlan,
    plan_matrices,
    weights_of,
)
from hetero_llm.models.read_config import load_model_config
from hetero_llm.models.registry import model_class
from hetero_llm.models.weight_files import StoredTensor, WeightFile, find_weight_files
from hetero_llm.quantization import nf4_checkpoint
from hetero_llm.quantization.calibrated import compensate
from hetero_llm.quantization.compressed import quantization_config, stored_tensors
from hetero_llm.quantization.matrix import QuantizedMatrix
from hetero_llm.quantization.names import OnlineName
from hetero_llm.quantization.online import OnlineFormat, OnlineScheme, int4_group

SHARD_BYTES = 4 << 30
_INDEX = "model.safetensors.index.json"

# (plan of a matrix, its plain weight on the host) -> what is stored of it, by suffix
Store = Callable[[MatrixPlan, Tensor], dict[str, Tensor]]


def write_quantized(
    folder: Path,
    out: Path,
    name: OnlineName,
    *,
    device: torch.device | str,
    allow_pickle: bool = False,
    show_progress: bool = False,
    shard_bytes: int = SHARD_BYTES,
    texts: Tensor | None = None,
) -> None:
    """Writes a checkpoint of compressed-tensors, or for nf4 of bitsandbytes: quantized matrices,
    all other tensors and files as they are.

    Args:
        folder: of a plain checkpoint.
        out: a folder that does not exist, or is empty.
        name: what weights become.
        device: where matrices are quantized.
        shard_bytes: of a file, but for one larger tensor.
        texts: [S, L] int64, tokens to calibrate with, see `quantize_with_texts`; None: each matrix
            is rounded by itself.

    Raises:
        ConfigError: `out` holds files, or the model is quantized already.
        ModelLoadError: the checkpoint cannot be read or quantized so.
    """
    check_out(out)
    model, files, plans = _planned(folder, name, allow_pickle)
    config, stored = model.config, [tensor for file in files for tensor in file.tensors]
    by_weight = {f"{plan.module}.weight": plan for plan in plans}
    total = sum(tensor.nbytes for file in files for tensor in file.tensors)
    group = int4_group(plan.columns for plan in plans) if name == "int4" else None
    # vLLM's experts of int4 have no zero points, and older readers know one scheme for all layers.
    symmetric = any(isinstance(module, Experts) for module in model.modules())
    scheme = OnlineScheme(name, group, symmetric)
    calibrated: dict[str, QuantizedMatrix] = {}
    if texts is not None:
        plain, owners = _plain_model(folder, config, torch.device(device), allow_pickle)
        layers = [(owners[plan.weight].layer, plan) for plan in plans]
        matrices = [(layer, plan) for layer, plan in layers if isinstance(layer, Linear)]
        calibrated = _calibrated(plain, matrices, texts, scheme, device, show_progress)
        del plain, owners, layers, matrices

    def store(plan: MatrixPlan, weight: Tensor) -> dict[str, Tensor]:
        matrix = calibrated.pop(plan.module, None)
        if matrix is None:
            matrix = scheme.quantize(weight.to(device)).to("cpu")
        write = nf4_checkpoint.stored_tensors if name == "ifq_nf4" else stored_tensors
        return write(matrix)

    out.mkdir(parents=True, exist_ok=True)
    with tqdm(
        total=total, unit="B", unit_scale=True, desc="quantizing", disable=not show_progress
    ) as bar:
        _write_shards(_converted(files, by_weight, store, bar), out, shard_bytes)
    _copy_others(folder, out)
    ignore = _left_plain(config, stored, by_weight)
    if name == "ifq_nf4":
        said = nf4_checkpoint.quantization_config(ignore)
    else:
        said = quantization_config(name, group or 0, ignore, symmetric=symmetric)
    written = {**read_json(folder / "config.json"), "quantization_config": said}
    (out / "config.json").write_text(json.dumps(written, indent=2) + "\n", encoding="utf-8")


def check_quantizable(folder: Path, name: OnlineName, *, allow_pickle: bool = False) -> None:
    """Raises what `write_quantized` would raise of the checkpoint; reads no weights."""
    _planned(folder, name, allow_pickle)


def _planned(
    folder: Path, name: OnlineName, allow_pickle: bool
) -> tuple[CausalLM, tuple[WeightFile, ...], tuple[MatrixPlan, ...]]:
    """The model without memory, its weight files, and the matrices that are to be quantized.

    Raises:
        ConfigError, ModelLoadError: see `write_quantized`.
    """
    config = load_model_config(folder, quantization=name)
    files = find_weight_files(folder, "auto", allow_pickle=allow_pickle)
    with default_dtype(torch.bfloat16), torch.device("meta"), weights_of() as weights:
        model = model_class(config.architecture)(config)
    targets = model.checkpoint_tensors().items()
    banks = [name for name, target in targets if isinstance(target, BankView)]
    if banks:
        reason = "holds the matrices of all experts, which no format here writes"
        raise ModelLoadError(f"{folder}: {banks[0].removesuffix('.weight')} {reason}")
    stored = {tensor.name: (file, tensor) for file in files for tensor in file.tensors}
    try:
        plans = plan_matrices(model, weights, OnlineFormat(name), stored)
    except ModelLoadError as error:
        raise ModelLoadError(f"{folder}: {error}") from error
    transposed = [plan.module for plan in plans if plan.transposed]
    if transposed:
        raise ModelLoadError(f"{folder}: {transposed[0]} is stored transposed, which is not served")
    return model, files, plans


def _left_plain(
    config: ModelConfig, stored: Iterable[StoredTensor], quantized: Container[str]
) -> list[str]:
    """Modules whose matrices stay plain, but for embeddings, in the order of their names."""
    found = {
        tensor.name.removesuffix(".weight")
        for tensor in stored
        if tensor.name.endswith(".weight")
        and len(tensor.shape) == 2
        and tensor.name not in quantized
        and "embed" not in tensor.name
    }
    if config.tie_word_embeddings:
        found.add("lm_head")
    return sorted(found)


def check_out(out: Path) -> None:
    """Raises ConfigError if a folder to write to exists and is not empty."""
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise ConfigError("out", str(out), "it exists; name a new folder")


def _plain_model(
    folder: Path, config: ModelConfig, device: torch.device, allow_pickle: bool
) -> tuple[CausalLM, list[LayerWeight]]:
    """The model on the host and its weights in the order in which it creates them: in float32
    where a CPU computes, else in the type that is stored."""
    weights: list[LayerWeight] = []

    def build(config: ModelConfig) -> CausalLM:
        with weights_of() as created:
            model = model_class(config.architecture)(config)
        weights[:] = created
        return model

    model = load_model(
        folder,
        replace(config, online_quantization=None),
        dtype=torch.float32 if device.type == "cpu" else getattr(torch, config.torch_dtype),
        device="cpu",
        show_progress=False,
        allow_pickle=allow_pickle,
        build=build,
    )
    return model, weights


def _calibrated(
    model: CausalLM,
    matrices: list[tuple[Linear, MatrixPlan]],
    texts: Tensor,
    scheme: OnlineScheme,
    device: torch.device | str,
    show_progress: bool,
) -> dict[str, QuantizedMatrix]:
    """See `quantize_with_texts`; the bar counts weights."""
    numbers = sum(plan.rows * plan.columns for _, plan in matrices)

    def quantize(weight: Tensor, moment: Tensor) -> QuantizedMatrix:
        return compensate(weight, scheme.quantize(weight, moment.diagonal()), moment)

    with tqdm(
        total=numbers, unit="", unit_scale=True, desc="calibrating", disable=not show_progress
    ) as bar:
        return quantize_with_texts(
            model,
            matrices,
            texts,
            quantize=quantize,
            device=torch.device(device),
            progress=bar.update,
        )


def _converted(
    files: tuple[WeightFile, ...], plans: dict[str, MatrixPlan], store: Store, bar: tqdm[None]
) -> Iterator[tuple[str, Tensor]]:
    """The tensors of the new checkpoint in the order of the old one's, on the host."""
    for file in files:
        file.open()
        try:
            for stored in file.tensors:
                tensor = _read(file, stored)
                bar.update(stored.nbytes)
                plan = plans.get(stored.name)
                if plan is None:
                    yield stored.name, tensor
                    continue
                for suffix, part in store(plan, tensor).items():
                    yield f"{plan.module}.{suffix}", part.contiguous()
        finally:
            file.close()


def _read(file: WeightFile, stored: StoredTensor) -> Tensor:
    if stored.dtype is None:
        raise ModelLoadError(f"{file.path}: {stored.name} has type {stored.type_name}")
    held = np.empty(stored.nbytes, np.uint8)
    file.read(stored, 0, held)
    return torch.from_numpy(held).view(stored.dtype).view(stored.shape)


def _write_shards(tensors: Iterator[tuple[str, Tensor]], out: Path, shard_bytes: int) -> None:
    """Files of at most `shard_bytes`, but for larger tensors, and an index if there are several."""
    shards: list[list[str]] = []
    held: dict[str, Tensor] = {}
    total = 0

    def flush() -> None:
        path = out / f"part-{len(shards)}"
        save_file(held, path, metadata={"format": "pt"})
        path.chmod(out.stat().st_mode & 0o666)  # the library's files are for their owner alone
        shards.append(list(held))
        held.clear()

    for name, tensor in tensors:
        if held and sum(t.nbytes for t in held.values()) + tensor.nbytes > shard_bytes:
            flush()
        held[name] = tensor
        total += tensor.nbytes
    flush()
    if len(shards) == 1:
        (out / "part-0").rename(out / "model.safetensors")
        return
    where: dict[str, str] = {}
    for number, names in enumerate(shards):
        file = f"model-{number + 1:05}-of-{len(shards):05}.safetensors"
        (out / f"part-{number}").rename(out / file)
        where |= dict.fromkeys(names, file)
    index = {"metadata": {"total_size": total}, "weight_map": where}
    (out / _INDEX).write_text(json.dumps(index, indent=2) + "\n", encoding="utf-8")


def _copy_others(folder: Path, out: Path) -> None:
    """The tokenizer and whatever else is no weight and no config.json."""
    weights = {path for pattern in (*SAFETENSORS, *PICKLED) for path in folder.glob(pattern)}
    for path in sorted(folder.iterdir()):
        skipped = path in weights or path.name.endswith(".index.json") or path.name == "SHA256SUMS"
        if path.is_file() and not skipped and path.name != "config.json":
            shutil.copyfile(path, out / path.name)
