"""A product with the adapters of its rows, by the kernels that serve it.

| rows, adapters, product | kernels |
|---|---|
| up to `fused_lora.MAX_ROWS` rows, ranks up to `fused_lora.MAX_RANK`, bf16 or fp16, `skinny_gemm.linear` or a `QuantizedProduct` with few rows | one: the product with the adapters inside |
| `skinny_gemm.linear` with more rows than `skinny_gemm.MAX_ROWS`: the library's product | three: `lora_shrink`, `lora_expand` into the new output, the product added to it |
| all others | three: `lora_shrink`, the product, `lora_expand` added to its output |
| gate and up of all but the first line (`product_before_gate`) | three: `lora_shrink`, the product, `lora_gate` in the place of its activation |

An expand behind the product reads and writes the output once more. Before it, it only writes: the
library's product reads the output under its arithmetic, which takes longer.

Sums of products with adapters inside lie in memory that a step has set up before (`StepRows`).
"""  # noqa: E501

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from hetero_llm.gpu.kernels import fused_lora, quantized_gemm, skinny_gemm
from hetero_llm.gpu.kernels.experts import align
from hetero_llm.gpu.kernels.fused_lora import FusedAdapters, RowSlots, num_sums, row_slots
from hetero_llm.gpu.kernels.lora import (
    LoraSlots,
    RowGroups,
    block_of,
    choose,
    lora_expand,
    lora_shrink,
)
from hetero_llm.gpu.kernels.lora_gate import lora_gate
from hetero_llm.gpu.kernels.quantized_product import QuantizedProduct
from hetero_llm.gpu.kernels.skinny_gemm import SkinnyConfig
from hetero_llm.models.layers import Product

_SORTED_AT_ONCE = 512
"""Rows that `align` looks at together: as many as the largest captured step has, so that larger
steps need no other kernel."""


class StepRows:
    """The adapters of the rows of one forward pass.

    Attributes:
        slots: [M] int32, see `RowSlots`.
    """

    def __init__(
        self, request_slots: Tensor, adapter_of: Tensor, *, num_slots: int, words: int
    ) -> None:
        """
        Args:
            request_slots: [M] int32 request slot of each row.
            adapter_of: [requests] int32 adapter slot of each request slot, or `NO_SLOT`.
            num_slots: adapter slots.
            words: `sums_of_product` of all products together.
        """
        self._rows: RowSlots | None = None  # None where no product has the adapters inside
        self._num_slots = num_slots
        self._groups: dict[int, RowGroups] = {}  # by the rows of a block
        if words == 0:
            self.slots = adapter_of.index_select(0, request_slots)
            return
        rows = row_slots(request_slots, adapter_of, num_slots=num_slots, words=words)
        self.slots, self._rows = rows.slots, rows
        self._taken = 0

    def take(self, weights: LoraSlots, words: int) -> FusedAdapters | None:
        """What the next product has inside, with room for its sums; None: no product has adapters
        inside, or there is no more room, as a layer runs twice."""
        if self._rows is None:
            return None
        begin, self._taken = self._taken, self._taken + words
        sums = self._rows.sums[begin : self._taken]
        return FusedAdapters(weights, self._rows, sums) if len(sums) == words else None

    def groups_for(self, x: Tensor, weights: LoraSlots) -> RowGroups:
        """The rows by adapter, for a product of x; made where the first product asks for them."""
        block = block_of(choose(len(x), weights.rank, x.dtype))
        if block not in self._groups:
            self._groups[block] = group_rows(self.slots, num_slots=self._num_slots, block=block)
        return self._groups[block]


def group_rows(slots: Tensor, *, num_slots: int, block: int) -> RowGroups:
    """Groups the rows of a step by adapter, on the device.

    Args:
        slots: [M] int32, `NO_SLOT` for rows without an adapter.
        num_slots: adapter slots.
        block: see `RowGroups`.
    """
    assert slots.dtype == torch.int32 and slots.ndim == 1, (slots.dtype, slots.shape)
    groups = align((slots + 1)[:, None], num_slots + 1, block, chunk=_SORTED_AT_ONCE)
    assert groups.pairs is not None
    return RowGroups(groups.pairs, groups.experts, len(slots), block)


def sums_of_product(product: Product, m: int, weights: LoraSlots) -> int:
    """Words of the sums of a product of m rows with the adapters inside; 0: they are not."""
    config = _fused_config(product, m, weights)
    return 0 if config is None else _num_sums(product, m, weights, config)


def product_with_adapters(
    product: Product,
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    *,
    rows: StepRows,
    weights: LoraSlots,
) -> Tensor:
    """`product(x, weight, bias)` and each row's adapter.

    Args:
        x: [M, K], rows contiguous, the rows of `rows`.
        weights: of the layer.

    Returns:
        [M, N] in x's dtype. The adapter's part is rounded to it before the library's product adds
        to it, the product's part before the adapter's is added by `lora_expand`.
    """
    y = _without_low(product, x, weight, bias, rows, weights)
    if y is not None:
        return y
    groups = rows.groups_for(x, weights)
    u = lora_shrink(x, groups, weights)
    if product is skinny_gemm.linear and len(x) > skinny_gemm.MAX_ROWS:
        y = x.new_empty(len(x), len(weight))
        lora_expand(y, u, groups, weights, add=False, bias=bias)
        return y.addmm_(x, weight.t())
    return lora_expand(product(x, weight, bias), u, groups, weights)


@dataclass(frozen=True)
class GateAdapters:
    """Adapters that a product of gate and up still lacks, for the activation behind it."""

    u: Tensor
    groups: RowGroups
    weights: LoraSlots

    def gate(self, gate_up: Tensor, name: str) -> Tensor:
        """`activation.gated_activation` of the product with its adapters."""
        return lora_gate(gate_up, self.u, self.groups, self.weights, name=name)


def product_before_gate(
    product: Product,
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    *,
    rows: StepRows,
    weights: LoraSlots,
) -> tuple[Tensor, GateAdapters | None]:
    """`product_with_adapters` of gate and up, whose activation may add the adapters.

    Args:
        weights: of two parts of one size.

    Returns:
        [M, N] in x's dtype, and what its activation must add; None: nothing.
    """
    y = _without_low(product, x, weight, bias, rows, weights)
    if y is not None:
        return y, None
    groups = rows.groups_for(x, weights)
    u = lora_shrink(x, groups, weights)
    return product(x, weight, bias), GateAdapters(u, groups, weights)


def _without_low(
    product: Product, x: Tensor, weight: Tensor, bias: Tensor | None,
    rows: StepRows, weights: LoraSlots,
) -> Tensor | None:  # fmt: skip
    """The whole result where it takes no `lora_shrink`: the adapters are inside of the product, or
    there are no rows. None: it takes one."""
    m = len(x)
    if m == 0:
        return product(x, weight, bias)
    config = _fused_config(product, m, weights)
    if config is None:
        return None
    if isinstance(product, QuantizedProduct):
        served = quantized_gemm.serves(x, product.matrix, bias)
    else:
        served = skinny_gemm.serves(x, weight, bias)
    if not served:
        return None
    adapters = rows.take(weights, _num_sums(product, m, weights, config))
    if adapters is None:
        return None
    if isinstance(product, QuantizedProduct):
        return quantized_gemm.quantized_linear(
            x, product.matrix, bias, config=config, adapters=adapters
        )
    return skinny_gemm.skinny_gemm(x, weight, bias, config=config, adapters=adapters)


def _fused_config(product: Product, m: int, weights: LoraSlots) -> SkinnyConfig | None:
    """How a product of m rows with the adapters inside is launched; None: it is not."""
    if not 0 < m <= fused_lora.MAX_ROWS:
        return None
    config = None
    if isinstance(product, QuantizedProduct):
        if m <= product.few_rows:
            config = quantized_gemm.choose(m, product.matrix)
    elif product is skinny_gemm.linear:
        n, k = weights.b.shape[1], weights.a.shape[2]
        config = skinny_gemm.choose(m, n, k, with_adapters=True)
    if config is None or not skinny_gemm.fuses(config, weights):
        return None
    return config


def _num_sums(product: Product, m: int, weights: LoraSlots, config: SkinnyConfig) -> int:
    of_kind = quantized_gemm if isinstance(product, QuantizedProduct) else skinny_gemm
    return num_sums(m, weights, of_kind.shrinking_programs(config, m, weights))
