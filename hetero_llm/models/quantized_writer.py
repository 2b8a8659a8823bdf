"""Writes a quantized copy of a checkpoint; one tensor and one file of output are in memory."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import torch
from safetensors.torch import save_file
from torch import Tensor
from tqdm import tqdm

from hetero_llm.core.errors import ConfigError, ModelLoadError
from hetero_llm.models.config_reader import read_json
from hetero_llm.models.folders import PICKLED, SAFETENSORS
from hetero_llm.models.loader import default_dtype
from hetero_llm.models.quantized_weights import MatrixPlan, linears_of, plan_matrices
from hetero_llm.models.read_config import load_model_config
from hetero_llm.models.registry import model_class
from hetero_llm.models.weight_files import StoredTensor, WeightFile, find_weight_files
from hetero_llm.quantization.compressed import WRITTEN, quantization_config, stored_tensors
from hetero_llm.quantization.names import OnlineName
from hetero_llm.quantization.online import OnlineFormat, OnlineScheme, int4_group

SHARD_BYTES = 4 << 30
_INDEX = "model.safetensors.index.json"


def write_quantized(
    folder: Path,
    out: Path,
    name: OnlineName,
    *,
    device: torch.device | str,
    allow_pickle: bool = False,
    show_progress: bool = False,
    shard_bytes: int = SHARD_BYTES,
) -> None:
    """Writes a checkpoint of compressed-tensors: quantized matrices, all other tensors and files as
    they are.

    Args:
        folder: of a plain checkpoint.
        out: a folder that does not exist, or is empty.
        name: of `WRITTEN`.
        device: where matrices are quantized.
        shard_bytes: of a file, but for one larger tensor.

    Raises:
        ConfigError: there is no such format, or `out` holds files.
        ModelLoadError: the checkpoint cannot be read or quantized so.
    """
    if name not in WRITTEN:
        known = ", ".join(WRITTEN)
        reason = f"no format of compressed-tensors; written are {known}"
        raise ConfigError("format", name, f"{reason}; quantization={name!r} makes it at each start")
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise ConfigError("out", str(out), "it exists; name a new folder")
    config = load_model_config(folder, quantization=name)
    files = find_weight_files(folder, "auto", allow_pickle=allow_pickle)
    with default_dtype(torch.bfloat16), torch.device("meta"), linears_of() as linears:
        model = model_class(config.architecture)(config)
    stored = {tensor.name: (file, tensor) for file in files for tensor in file.tensors}
    try:
        plans = plan_matrices(model, linears, OnlineFormat(name), stored)
    except ModelLoadError as error:
        raise ModelLoadError(f"{folder}: {error}") from error
    transposed = [plan.module for plan in plans if plan.transposed]
    if transposed:
        raise ModelLoadError(f"{folder}: {transposed[0]} is stored transposed, which is not served")
    by_weight = {f"{plan.module}.weight": plan for plan in plans}
    total = sum(tensor.nbytes for file in files for tensor in file.tensors)
    group = int4_group(plan.columns for plan in plans)
    out.mkdir(parents=True, exist_ok=True)
    with tqdm(
        total=total, unit="B", unit_scale=True, desc="quantizing", disable=not show_progress
    ) as bar:
        scheme = OnlineScheme(name, group)
        tensors = _converted(files, by_weight, scheme, torch.device(device), bar)
        _write_shards(tensors, out, shard_bytes)
    _copy_others(folder, out)
    ignore = [
        tensor.name.removesuffix(".weight")
        for _, tensor in stored.values()
        if tensor.name.endswith(".weight")
        and len(tensor.shape) == 2
        and tensor.name not in by_weight
        and "embed" not in tensor.name
    ]
    if config.tie_word_embeddings:
        ignore.append("lm_head")
    written = {
        **read_json(folder / "config.json"),
        "quantization_config": quantization_config(name, group, sorted(set(ignore))),
    }
    (out / "config.json").write_text(json.dumps(written, indent=2) + "\n", encoding="utf-8")


def _converted(
    files: tuple[WeightFile, ...],
    plans: dict[str, MatrixPlan],
    scheme: OnlineScheme,
    device: torch.device,
    bar: tqdm[None],
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
                weight = {"weight": tensor.to(device)}
                matrix = scheme.convert(weight, plan.rows, plan.columns)
                for suffix, part in stored_tensors(matrix.to("cpu")).items():
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
