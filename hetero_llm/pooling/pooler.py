"""Hidden states to one vector, in float32."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor, nn

from hetero_llm.core.errors import ModelLoadError
from hetero_llm.models.config_reader import short_reason
from hetero_llm.pooling.sentence_transformers import DenseModule
from hetero_llm.utils.files import check_regular


def pool_padded(hidden: Tensor, lengths: Tensor, pooling: str) -> Tensor:
    """One vector for each row of a batch.

    Args:
        hidden: [B, T, D], padded on the right.
        lengths: [B] tokens of each row.
        pooling: "CLS", "MEAN" or "LAST".

    Returns:
        [B, D] float32.
    """
    if pooling == "CLS":
        return hidden[:, 0].float()
    if pooling == "LAST":
        rows = torch.arange(len(hidden), device=hidden.device)
        return hidden[rows, lengths - 1].float()
    tokens = torch.arange(hidden.shape[1], device=hidden.device)
    inside = (tokens < lengths[:, None]).unsqueeze(-1)
    return (hidden.float() * inside).sum(1) / lengths[:, None]


class ChunkPool:
    """Pools the hidden states of one sequence that come in chunks."""

    def __init__(self, pooling: str) -> None:
        self._pooling = pooling
        self._value: Tensor | None = None
        self._count = 0

    def add(self, hidden: Tensor) -> None:
        """`hidden`: [T, D] of the tokens that follow those of the last call."""
        self._count += len(hidden)
        if self._pooling == "LAST":
            self._value = hidden[-1]
        elif self._pooling == "MEAN":
            total = hidden.float().sum(0)
            self._value = total if self._value is None else self._value + total
        elif self._value is None:
            self._value = hidden[0]

    def value(self) -> Tensor:
        """[D], in the dtype of the hidden states unless it is a mean, which is float32."""
        assert self._value is not None
        return self._value / self._count if self._pooling == "MEAN" else self._value


class DenseLayers(nn.Module):
    """The layers that sentence-transformers puts behind the pooling, in float32."""

    def __init__(self, layers: Sequence[DenseModule], device: torch.device) -> None:
        """Reads the weights.

        Raises:
            ModelLoadError: a file is missing, damaged or of other sizes.
        """
        super().__init__()
        self._tanh = [layer.activation == "tanh" for layer in layers]
        self.layers = nn.ModuleList(_linear(layer) for layer in layers)
        self.to(device).requires_grad_(False)

    def forward(self, pooled: Tensor) -> Tensor:
        """[B, in] float32 -> [B, out]."""
        for layer, tanh in zip(self.layers, self._tanh, strict=True):
            pooled = layer(pooled)
            pooled = torch.tanh(pooled) if tanh else pooled
        return pooled


def _linear(layer: DenseModule) -> nn.Linear:
    from safetensors.torch import load_file

    path = Path(layer.folder) / "model.safetensors"
    try:
        check_regular(path)
        stored = {name.removeprefix("linear."): one for name, one in load_file(path).items()}
        linear = nn.Linear(layer.in_features, layer.out_features, bias="bias" in stored)
        linear.load_state_dict({name: one.float() for name, one in stored.items()})
    except Exception as error:  # of the file's reader, or a mismatch of names and shapes
        raise ModelLoadError(f"{path}: cannot be used: {short_reason(error)}") from error
    return linear
