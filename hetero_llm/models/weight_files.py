"""The weight files of a model: lists them, and reads their headers and bytes.

Safetensors and GGUF files are read with positioned reads, not mapped: pages of the file do not
count as the process's memory, several threads read one file, and a failing disk raises an error
instead of a signal. Pickled files are read by torch with `weights_only`: they may hold tensors
only.
"""

from __future__ import annotations

import json
import os
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Protocol

import numpy as np
import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from hetero_llm.core.errors import ConfigError, ModelLoadError, shown
from hetero_llm.models.config_reader import read_json
from hetero_llm.models.folders import PICKLED, SAFETENSORS, is_hub_snapshot, weight_files
from hetero_llm.models.gguf.config import block_types
from hetero_llm.models.gguf.container import SUFFIX, GgufTensor, is_gguf, read_header, reading
from hetero_llm.models.gguf.names import ROPE_FACTORS, matrices_apart
from hetero_llm.models.gguf.rows import TensorRows
from hetero_llm.utils.files import MIB, check_regular

_SAFETENSORS_INDEX = "model.safetensors.index.json"
_PICKLED_INDEX = "pytorch_model.bin.index.json"
_MOST_INDEX = 256 * MIB
_ZIP_MAGIC = b"PK\x03\x04"
_FLAG = "--allow-pickle-weights (allow_pickle_weights=True)"
_DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
}
"""Types of plain weights."""
_QUANTIZED_DTYPES = {
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E8M0": torch.uint8,  # the exponents' bits
    "I8": torch.int8,
    "U8": torch.uint8,
    "I32": torch.int32,
    "I64": torch.int64,
}
"""Further types of the parts of quantized weights."""
_NAMES = {dtype: name for name, dtype in (_QUANTIZED_DTYPES | _DTYPES).items()}


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """The header of one tensor of a file.

    Attributes:
        type_name: The type's name in safetensors, or in torch.
        dtype: In which its bytes are read; None for types that cannot be loaded.
        start: Sorts the tensors of a file by their bytes; in a safetensors file, the offset of its
            first byte.
    """

    name: str
    type_name: str
    dtype: torch.dtype | None
    shape: tuple[int, ...]
    start: int

    @property
    def is_plain(self) -> bool:
        """Whether it may be a plain weight."""
        return self.type_name in _DTYPES

    @property
    def nbytes(self) -> int:
        """Stored size; only of tensors with a dtype."""
        assert self.dtype is not None
        return int(np.prod(self.shape, dtype=np.int64)) * self.dtype.itemsize


class WeightFile(Protocol):
    """One file, with `tensors` in the order of their bytes."""

    path: Path
    tensors: tuple[StoredTensor, ...]

    def open(self) -> None:
        """Before the first `read`."""

    def read(self, tensor: StoredTensor, offset: int, out: np.ndarray) -> None:
        """Fills `out` (uint8, one-dimensional) with the tensor's bytes from `offset` on, in row
        order. Any thread may call it.

        Raises:
            ModelLoadError: The disk fails, or the file has become shorter.
        """

    def close(self) -> None:
        """After the last `read`; harmless if the file is not open."""


def find_weight_files(
    folder: Path, load_format: str, *, allow_pickle: bool, keep_blocks: bool = False
) -> tuple[WeightFile, ...]:
    """The files to load, with their headers read.

    A GGUF file stands in `folder` for a folder. In a folder an index lists the files; without one,
    all files of the format are loaded.

    Args:
        load_format: Of `folders.LOAD_FORMATS`, but not "dummy".
        keep_blocks: See `GgufFile`.

    Raises:
        ConfigError: "pt" without `allow_pickle`; "gguf" for a folder, or another format for a GGUF
            file.
        ModelLoadError: There is no file, one is missing or damaged, or all are pickled and
            `allow_pickle` is false.
    """
    if is_gguf(folder):
        if load_format not in ("auto", "gguf"):
            raise ConfigError("load_format", load_format, f"{folder} is a GGUF file")
        return (GgufFile(folder, keep_blocks=keep_blocks),)
    if load_format == "gguf":
        raise ConfigError("load_format", load_format, f"{folder} is no *{SUFFIX} file")
    if load_format == "pt" and not allow_pickle:
        raise ConfigError("load_format", load_format, f"pickled weights need {_FLAG}")
    if load_format != "pt":
        paths = _listed(folder, _SAFETENSORS_INDEX, SAFETENSORS)
        if paths:
            return tuple(map(SafetensorsFile, paths))
    pickled = _listed(folder, _PICKLED_INDEX, PICKLED)
    if not pickled:
        wanted = PICKLED[0] if load_format == "pt" else SAFETENSORS[0]
        hint = ""
        if is_hub_snapshot(folder) and not allow_pickle:
            hint = f"; if the hub has pickled weights of this model, {_FLAG} fetches them"
        raise ModelLoadError(f"{folder}: no {wanted} file{hint}")
    if load_format == "safetensors":
        raise ModelLoadError(f"{folder}: no {SAFETENSORS[0]} file, only {pickled[0].name}")
    if not allow_pickle:
        raise ModelLoadError(
            f"{folder}: only pickled weights ({pickled[0].name}); safetensors files are needed: "
            "from_pretrained(...).save_pretrained(...) of transformers converts them. "
            f"{_FLAG} reads them as they are"
        )
    return tuple(map(PickledFile, pickled))


def _listed(folder: Path, index_name: str, patterns: tuple[str, ...]) -> list[Path]:
    index = folder / index_name
    paths = _indexed_files(index) if index.exists() else weight_files(folder, patterns)
    for path in paths:
        with reading(f"{path}:"):
            check_regular(path)
    return paths


def _indexed_files(index: Path) -> list[Path]:
    weight_map = read_json(index, most=_MOST_INDEX).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise ModelLoadError(f"{index}: not a weight index: weight_map={shown(weight_map)}")
    names = weight_map.values()
    for name in names:
        if not isinstance(name, str) or Path(name).name != name or "\0" in name:
            raise ModelLoadError(f"{index}: {shown(name)} is not a file name")
    for name in sorted(set(names)):
        if not (index.parent / name).is_file():
            raise ModelLoadError(f"{index}: names the shard {name}, which is missing")
    return [index.parent / name for name in sorted(set(names))]


class _PositionedFile:
    """Reads runs of bytes of a file from any thread."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._descriptor: int | None = None

    def open(self) -> None:
        with reading(f"{self.path}:"):
            self._descriptor = os.open(self.path, os.O_RDONLY | os.O_CLOEXEC)

    def _read(self, name: str, at: int, out: np.ndarray) -> None:
        """Fills `out` (uint8, one-dimensional) from byte `at` of the file on.

        Raises:
            ModelLoadError: names the tensor `name`: the disk fails, or the file has become shorter.
        """
        assert self._descriptor is not None
        done, left = 0, out.data
        with reading(f"{self.path}: {name}"):
            while done < out.nbytes:
                got = os.preadv(self._descriptor, [left[done:]], at + done)
                if got == 0:
                    raise ModelLoadError(f"{self.path}: {name}: the file ends inside of it")
                done += got

    def close(self) -> None:
        descriptor, self._descriptor = self._descriptor, None
        if descriptor is not None:
            os.close(descriptor)


class SafetensorsFile(_PositionedFile):
    """See `WeightFile`."""

    def __init__(self, path: Path) -> None:
        """Reads the header, whose sizes the library checks against the file's."""
        super().__init__(path)
        try:
            with safe_open(path, framework="numpy"):
                pass
            with path.open("rb") as file:
                length = int.from_bytes(file.read(8), "little")
                header = json.loads(file.read(length))
        except (SafetensorError, OSError, ValueError, MemoryError) as error:
            raise ModelLoadError(
                f"{path}: not a readable safetensors file, copy or download it again: {error}"
            ) from error
        self._data = 8 + length
        found = [
            StoredTensor(
                name,
                about["dtype"],
                (_DTYPES | _QUANTIZED_DTYPES).get(about["dtype"]),
                tuple(about["shape"]),
                about["data_offsets"][0],
            )
            for name, about in header.items()
            if name != "__metadata__"
        ]
        self.tensors = tuple(sorted(found, key=lambda tensor: tensor.start))

    def read(self, tensor: StoredTensor, offset: int, out: np.ndarray) -> None:
        self._read(tensor.name, self._data + tensor.start + offset, out)


class GgufFile(_PositionedFile):
    """See `WeightFile`. Names, order of rows and norms are those of transformers' checkpoints.

    Args:
        keep_blocks: Matrices of `block_types` are [rows, bytes of a row] of their type ("Q4_K");
            else all blocks are read as float32.
    """

    def __init__(self, path: Path, *, keep_blocks: bool) -> None:
        """Reads the header.

        Raises:
            ModelLoadError: it cannot be read, or two tensors have one name in transformers.
        """
        super().__init__(path)
        header = matrices_apart(read_header(path))
        self._rows = TensorRows(header)
        self._stored: dict[str, GgufTensor] = {}
        self._kept = block_types(header) if keep_blocks else {}
        found = []
        for entry in header.tensors.values():
            if entry.name == ROPE_FACTORS:
                continue
            name, kind, shape = self._rows.name(entry), entry.type.name, entry.shape
            if name in self._stored:
                both = f"{shown(self._stored[name].name)} and {shown(entry.name)}"
                raise ModelLoadError(f"{path}: the tensors {both} are both {name}")
            self._stored[name] = entry
            if entry.name in self._kept:
                dtype, shape = torch.uint8, (entry.rows, entry.row_bytes)
            else:
                kind = kind if entry.type.is_plain else "F32"
                dtype = _DTYPES[kind]
            found.append(StoredTensor(name, kind, dtype, shape, entry.start))
        self.tensors = tuple(sorted(found, key=lambda tensor: tensor.start))

    def read(self, tensor: StoredTensor, offset: int, out: np.ndarray) -> None:
        entry = self._stored[tensor.name]
        fetch = partial(self._read, tensor.name)
        self._rows.fill(entry, offset, out, fetch, as_stored=entry.name in self._kept)


class PickledFile:
    """See `WeightFile`. A file in torch's zip format is mapped; one in the format before torch 1.6
    cannot be mapped and is in memory as a whole while it is open."""

    def __init__(self, path: Path) -> None:
        """Reads names and shapes."""
        self.path = path
        self._open: dict[str, Tensor] = {}
        tensors = self._load("meta")
        self.tensors = tuple(
            StoredTensor(
                name,
                _NAMES.get(tensor.dtype, str(tensor.dtype).removeprefix("torch.")),
                tensor.dtype if tensor.dtype in _NAMES else None,
                tuple(tensor.shape),
                start,
            )
            for start, (name, tensor) in enumerate(tensors.items())
        )

    def open(self) -> None:
        self._open = {name: tensor.contiguous() for name, tensor in self._load("cpu").items()}

    def read(self, tensor: StoredTensor, offset: int, out: np.ndarray) -> None:
        found = self._open[tensor.name].view(-1).view(torch.uint8)
        np.copyto(out, found[offset : offset + out.nbytes].numpy())

    def close(self) -> None:
        self._open = {}

    def _load(self, device: str) -> dict[str, Tensor]:
        try:
            with self.path.open("rb") as file:
                is_zip = file.read(len(_ZIP_MAGIC)) == _ZIP_MAGIC
            found = torch.load(self.path, map_location=device, weights_only=True, mmap=is_zip)
        except Exception as error:  # of any kind: the file is damaged
            raise ModelLoadError(f"{self.path}: {_why(error)}") from error
        return _only_tensors(self.path, found)


def _why(error: Exception) -> str:
    """The line of torch's message that names the cause."""
    text = str(error) or type(error).__name__
    marks = ("Trying to load", "WeightsUnpickler error:")
    start = next((text.find(mark) for mark in marks if mark in text), 0)
    line = text[start:].splitlines()[0][:200]
    if "GLOBAL" in line:
        return f"holds more than tensors, which is never unpickled: {line}"
    return f"not a readable file of pickled tensors, copy or download it again: {line}"


def _only_tensors(path: Path, found: object) -> dict[str, Tensor]:
    if not isinstance(found, dict):
        raise ModelLoadError(f"{path}: holds {type(found).__name__}, not tensors by name")
    for name, value in found.items():
        is_plain = isinstance(value, Tensor) and value.layout is torch.strided
        if not isinstance(name, str) or not is_plain:
            raise ModelLoadError(
                f"{path}: {shown(name)} is {type(value).__name__}, where tensors are needed"
            )
    return {name: value.detach() for name, value in found.items()}
