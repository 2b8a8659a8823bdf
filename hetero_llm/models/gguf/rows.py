"""Rows of a GGUF file's tensors as transformers' checkpoints have them: heads in the order of
transformers, norms as it stores them, and blocks dequantized where the caller wants numbers."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch

from hetero_llm.core.errors import ModelLoadError
from hetero_llm.models.gguf.config import head_dim_of
from hetero_llm.models.gguf.container import GgufHeader, GgufTensor
from hetero_llm.models.gguf.names import family_of
from hetero_llm.quantization.gguf.blocks import to_floats

# (offset in the file, buffer to fill)
Fetch = Callable[[int, np.ndarray], None]


class TensorRows:
    """Reads parts of tensors by their offset in the converted tensor."""

    def __init__(self, header: GgufHeader) -> None:
        """Raises ModelLoadError: a tensor cannot be converted."""
        self._family = family_of(header)
        self._head_dim = head_dim_of(header)
        half = self._head_dim // 2
        # Row j * half + i of a head of transformers is row 2i + j of the file.
        self._order = np.arange(2 * half).reshape(half, 2).T.reshape(-1)
        for tensor in header.tensors.values():
            rows, plain = self._shape(tensor)[0], tensor.type.is_plain
            what = f"{header.path}: {tensor.name} is {tensor.type.name} {list(tensor.shape)}: "
            wrong = rows % self._head_dim or self._head_dim % 2
            if self._is_rotated(tensor) and (wrong or not (plain or len(tensor.shape) == 2)):
                raise ModelLoadError(f"{what}no whole heads of {self._head_dim} rows")
            if self._family.is_plus_one(tensor.name) and tensor.type.name != "F32":
                raise ModelLoadError(f"{what}norms in F32 are needed")

    def name(self, tensor: GgufTensor) -> str:
        """In transformers."""
        return self._family.name(tensor.name)

    def fill(
        self, tensor: GgufTensor, offset: int, out: np.ndarray, fetch: Fetch, *, as_stored: bool
    ) -> None:
        """Fills `out` with the bytes of the converted tensor from `offset` on.

        Args:
            out: [any] uint8.
            fetch: reads from the file.
            as_stored: blocks stay blocks; else they become float32.
        """
        rotated, plus_one = self._is_rotated(tensor), self._family.is_plus_one(tensor.name)
        blocks = not tensor.type.is_plain and not as_stored
        if not (rotated or plus_one or blocks):
            fetch(tensor.start + offset, out)
            return
        rows, row_bytes = self._shape(tensor)
        width = 4 * tensor.shape[-1] if blocks else row_bytes  # of a converted row, in bytes
        step = self._head_dim if rotated else 1
        first = offset // width // step * step
        last = min(rows, -(-(offset + out.nbytes) // (width * step)) * step)
        stored = np.empty((last - first) * row_bytes, np.uint8)
        fetch(tensor.start + first * row_bytes, stored)
        if rotated:
            heads = stored.reshape(-1, self._head_dim, row_bytes)
            stored = heads[:, self._order].reshape(-1)
        if blocks:
            raw = torch.from_numpy(stored).view(last - first, row_bytes)
            stored = to_floats(tensor.type.name, raw).numpy().view(np.uint8).reshape(-1)
        if plus_one:
            stored = (stored.view(np.float32) - np.float32(1)).view(np.uint8)
        begin = offset - first * width
        np.copyto(out, stored[begin : begin + out.nbytes])

    def _is_rotated(self, tensor: GgufTensor) -> bool:
        return self._family.is_rotated(tensor.name)

    def _shape(self, tensor: GgufTensor) -> tuple[int, int]:
        """Rows and bytes of a row; each entry of a bias is one."""
        if len(tensor.shape) == 1 and self._is_rotated(tensor):
            return tensor.shape[0], tensor.type.nbytes
        return tensor.rows, tensor.row_bytes
