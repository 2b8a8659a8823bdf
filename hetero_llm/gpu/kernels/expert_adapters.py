"""Experts of a mixture whose rows have low-rank adapters of their own, one for each expert.

A *pair* (`experts`) has the adapter of its row and its expert. Pairs are sorted once a layer by
both (`group_pairs`), and `lora_shrink` and `lora_expand` add to the grouped products what they add
to those of other layers: of gate and up before their activation, which is a launch of its own then,
and of down before the outputs are weighted. Pairs without an adapter keep the products' outputs.

Wrapper `adapted_experts`, reference `adapted_experts_reference`; timed by `bench.kernels.lora`
(`--what experts`).
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import partial

import torch
from torch import Tensor

from hetero_llm.gpu.kernels.activation import gated_activation
from hetero_llm.gpu.kernels.experts import (
    Biases,
    align,
    combine,
    experts,
    groups_of,
    most_blocks,
)
from hetero_llm.gpu.kernels.experts import choose as choose_plain
from hetero_llm.gpu.kernels.lora import (
    MOST_TILES,
    NO_SLOT,
    LoraLaunches,
    LoraSlots,
    RowGroups,
    block_of,
    choose,
    lora_expand,
    lora_shrink,
)
from hetero_llm.gpu.kernels.quantized_experts import (
    Weights,
    dense_weights,
    pair_product,
    quantized_experts,
    serves,
)
from hetero_llm.models.config import Gate
from hetero_llm.models.experts import expert_weight, sum_by_own_tokens
from hetero_llm.models.layers import GatedActivation

MOST_BINS = 2048  # of `align`, which has a program for each


@dataclass(frozen=True)
class ExpertKernels:
    """`Experts.function` by kernels.

    Attributes:
        activation, biases: see `experts`.
        gate_up, down: weights in the order of the kernels; None: those of the call.
    """

    activation: Gate
    biases: Biases | None
    gate_up: Weights | None = None
    down: Weights | None = None

    @property
    def is_quantized(self) -> bool:
        return self.gate_up is not None or self.down is not None

    def weights(self, gate_up: Tensor, down: Tensor) -> tuple[Weights, Weights]:
        """Those that are multiplied where a call has these."""
        first, second = self.gate_up, self.down
        return gate_up if first is None else first, down if second is None else second

    def __call__(
        self, x: Tensor, ids: Tensor, weights: Tensor, gate_up: Tensor, down: Tensor
    ) -> Tensor:
        gate, biases = self.activation, self.biases
        if not self.is_quantized:
            return experts(x, ids, weights, gate_up, down, activation=gate, biases=biases)
        matrices = self.weights(gate_up, down)
        return quantized_experts(x, ids, weights, *matrices, activation=gate, biases=biases)

    def adapted(
        self,
        x: Tensor,
        ids: Tensor,
        weights: Tensor,
        gate_up: Tensor,
        down: Tensor,
        *,
        adapters: ExpertAdapters,
    ) -> Tensor:
        """The same with the adapters of the rows."""
        matrices = self.weights(gate_up, down)
        return adapted_experts(
            *(x, ids, weights, *matrices),
            activation=self.activation,
            biases=self.biases,
            adapters=adapters,
        )


@dataclass(frozen=True)
class ExpertAdapters:
    """The adapters of a layer's experts.

    Attributes:
        slots: [T] int32 adapter slot of each row, or `NO_SLOT`.
        gate_up, down: with `experts`.
    """

    slots: Tensor
    gate_up: LoraSlots
    down: LoraSlots


def group_pairs(
    slots: Tensor, ids: Tensor, *, num_slots: int, num_experts: int, block: int
) -> RowGroups:
    """Groups the pairs of a step by adapter and expert, on the device.

    Args:
        slots: [T] int32, `NO_SLOT` for rows without an adapter.
        ids: [T, k] int, each in [0, num_experts).
        num_slots: adapter slots.
        block: see `RowGroups`.
    """
    keys = slots[:, None] * num_experts + ids + 1
    keys = torch.where(slots[:, None] == NO_SLOT, 0, keys).to(torch.int32)
    bins = num_slots * num_experts + 1
    if bins > MOST_BINS:
        return _sorted_pairs(keys.flatten(), bins, block)
    groups = align(keys, bins, block)
    assert groups.pairs is not None
    return RowGroups(groups.pairs, groups.experts, keys.numel(), block)


def _sorted_pairs(keys: Tensor, bins: int, block: int) -> RowGroups:
    """`group_pairs` where there are many kinds of pairs: by a sort."""
    count, device = len(keys), keys.device
    blocks = most_blocks(count, bins, block)
    sorted_keys, order = keys.sort(stable=True)
    positions = torch.arange(count, device=device)
    starts = torch.ones_like(positions, dtype=torch.bool)
    starts[1:] = sorted_keys[1:] != sorted_keys[:-1]
    within = positions - torch.where(starts, positions, 0).cummax(0).values
    block_of_pair = (within % block == 0).cumsum(0) - 1
    rows = torch.full((blocks * block,), count, dtype=torch.int32, device=device)
    rows.scatter_(0, block_of_pair * block + within % block, order.to(torch.int32))
    adapters = torch.full((blocks,), -1, dtype=torch.int32, device=device)
    adapters.scatter_(0, block_of_pair, sorted_keys)
    return RowGroups(rows, adapters, count, block)


def adapted_experts(
    x: Tensor,
    ids: Tensor,
    weights: Tensor,
    gate_up: Weights,
    down: Weights,
    *,
    activation: Gate,
    biases: Biases | None,
    adapters: ExpertAdapters,
) -> Tensor:
    """`experts` or `quantized_experts` with each row's adapter.

    Args:
        x: [T, hidden] of the adapters' dtype, rows contiguous.
        adapters: of the T rows.

    Returns:
        [T, hidden] in x's dtype. Each product is rounded to it before the adapter's part is added.
    """
    (rows, k), num_experts = ids.shape, adapters.down.experts
    num_slots = len(adapters.down.a)
    if rows == 0:
        return torch.empty_like(x)
    launches = _launches(rows * k, num_experts, adapters.down)
    if rows > 1 and _num_tiles(rows * k, num_slots * num_experts + 1, launches) > MOST_TILES:
        half = rows // 2
        halves = [
            adapted_experts(
                *(x[part], ids[part], weights[part], gate_up, down),
                activation=activation,
                biases=biases,
                adapters=replace(adapters, slots=adapters.slots[part]),
            )
            for part in (slice(half), slice(half, None))
        ]
        return torch.cat(halves)
    if not (serves(x, gate_up) and serves(x, down)):
        gate_up, down = (dense_weights(w, num_experts, x.dtype) for w in (gate_up, down))
    # Both products are plain here, so both have the tiles of `down`.
    tile = choose_plain(rows, k, num_experts, x.itemsize)[1]
    of_experts = groups_of(ids, num_experts, tile.block_m)
    pairs = group_pairs(
        *(adapters.slots, ids),
        num_slots=num_slots,
        num_experts=num_experts,
        block=block_of(launches),
    )
    product = partial(pair_product, groups=of_experts, count=num_experts, config=tile)
    of_first, of_second = biases or (None, None)

    def multiply(rows: Tensor, matrix: Weights, own: LoraSlots, bias: Tensor | None) -> Tensor:
        u = lora_shrink(rows, pairs, own, config=launches.shrink)
        y = product(rows, matrix, activation="", bias=bias)
        if y.dim() == 3:
            y = y.sum(0).to(rows.dtype)
        return lora_expand(y, u, pairs, own, config=launches.add)

    middle = gated_activation(multiply(x, gate_up, adapters.gate_up, of_first), activation)
    return combine(multiply(middle, down, adapters.down, of_second), weights)


def _launches(num_pairs: int, num_experts: int, weights: LoraSlots) -> LoraLaunches:
    """By the pairs of an expert, which a block has at most."""
    return choose(max(1, num_pairs // num_experts), weights.rank, weights.a.dtype)


def _num_tiles(num_pairs: int, bins: int, launches: LoraLaunches) -> int:
    """The most tiles of places that a launch has."""
    block = block_of(launches)
    each = block // min(launches.shrink.block_m, launches.add.block_m)
    return most_blocks(num_pairs, bins, block) * each


def adapted_experts_reference(
    x: Tensor,
    ids: Tensor,
    weights: Tensor,
    gate_up: Tensor,
    down: Tensor,
    *,
    activation: Gate,
    biases: Biases | None,
    adapters: ExpertAdapters,
) -> Tensor:
    """`adapted_experts` in plain torch, one expert and slot after the other, in float32; takes a
    `QuantizedStack` for a weight, too. A new tensor of x's dtype."""
    gate = GatedActivation(activation)

    def add(own: LoraSlots, expert: int, slots: Tensor, rows: Tensor, y: Tensor) -> None:
        for slot in slots.unique().tolist():
            if slot == NO_SLOT:
                continue
            here = slots == slot
            a, b = own.a[slot, expert].float(), own.b[slot, expert].float()
            u = rows[here] @ a.t() * own.scales[slot, expert]
            for part in range(own.parts):
                first, stop = own.bounds[part : part + 2].tolist()
                low = u[:, part * own.rank : (part + 1) * own.rank]
                y[here, first:stop] += low @ b[first:stop].t()

    def mlp(which: Tensor | slice, expert: int) -> Tensor:
        rows, slots = x[which].float(), adapters.slots[which]
        first, second = (None, None) if biases is None else (b[expert].float() for b in biases)
        matrices = (expert_weight(w, expert, x.dtype).float() for w in (gate_up, down))
        y = torch.nn.functional.linear(rows, next(matrices), first)
        add(adapters.gate_up, expert, slots, rows, y)
        middle = gate.plain(y)
        out = torch.nn.functional.linear(middle, next(matrices), second)
        add(adapters.down, expert, slots, middle, out)
        return out

    return sum_by_own_tokens(mlp, x, ids, weights)
