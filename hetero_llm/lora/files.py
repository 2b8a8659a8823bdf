"""The folders in which PEFT saves adapters: found or fetched from the hub; their tensors read."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from hetero_llm.core.errors import AdapterError, ModelLoadError
from hetero_llm.lora.peft_config import FILE
from hetero_llm.models.folders import download_snapshot, is_hub_id, local_path
from hetero_llm.models.weight_files import PickledFile, SafetensorsFile, StoredTensor, WeightFile

SAFETENSORS, PICKLED = "adapter_model.safetensors", "adapter_model.bin"


def adapter_folder(path: str, *, field: str, download_dir: str | None = None) -> Path:
    """The local folder of an adapter. That of a hub id is fetched; without a connection, or with
    HF_HUB_OFFLINE=1, a snapshot in the hub's cache is used.

    Args:
        path: a folder, or a hub id such as "org/name".
        field: of the request that has the path, for errors.
        download_dir: cache folder of downloads; None: huggingface_hub's own.

    Raises:
        AdapterError: no such folder, and the hub did not deliver it.
    """
    try:
        folder = local_path(path)
    except ModelLoadError as error:
        raise AdapterError(field, path, str(error)) from error
    if folder.is_dir():
        return folder
    if folder.exists() or not is_hub_id(path):
        raise AdapterError(field, path, "no such folder")
    try:
        found = download_snapshot(path, (FILE, SAFETENSORS), download_dir=download_dir)
        if not (found / SAFETENSORS).exists():
            found = download_snapshot(path, (FILE, PICKLED), download_dir=download_dir)
    except ModelLoadError as error:
        raise AdapterError(field, path, f"no such folder, and {error}") from error
    return found


def open_weights(folder: Path, *, field: str) -> WeightFile:
    """The file with an adapter's tensors, its names and shapes read.

    Raises:
        AdapterError: there is none.
        ModelLoadError: it is damaged.
    """
    if (folder / SAFETENSORS).exists():
        return SafetensorsFile(folder / SAFETENSORS)
    if (folder / PICKLED).exists():
        return PickledFile(folder / PICKLED)
    raise AdapterError(field, str(folder), f"holds no {SAFETENSORS}")


def read_tensors(file: WeightFile, wanted: Sequence[StoredTensor]) -> dict[str, Tensor]:
    """Plain tensors by name, in the type of the file."""
    file.open()
    try:
        return {tensor.name: _read_one(file, tensor) for tensor in wanted}
    finally:
        file.close()


def _read_one(file: WeightFile, tensor: StoredTensor) -> Tensor:
    assert tensor.dtype is not None
    raw = np.empty(tensor.nbytes, np.uint8)
    file.read(tensor, 0, raw)
    return torch.from_numpy(raw).view(tensor.dtype).view(tensor.shape)
