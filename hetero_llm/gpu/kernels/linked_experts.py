"""A part of the experts on the host, computed on the GPU, which reads their weights over the link.

CPU threads read host memory slower than it can be read: beside them the GPU reads a part of the
experts that a small step misses (`bridge.expert_mailbox.LinkPart`). Either the kernels here take
some of these experts, those of the highest numbers; or they take the last inner rows of each
(gates, ups, and the columns of `down` that meet them) and the threads the first ones. Neither side
needs anything of the other: both find the part by the request, and `expert_requests.wait_add` adds
the two sums in a fixed order.

Weights are read where they lie, as the checkpoint has them, by wide loads from page-locked memory;
a program has up to 32 KiB under way. An element is computed in float32 as
`quantization.matrix.dequantize` does it, and multiplied as two 16-bit numbers, of which the second
is what the first one lacks: exact but for the order of sums. Each expert is read once for all
tokens of the step. Experts without a token are not read, and a step that misses none reads nothing.

Reference `linked_experts_reference`; timed by `bench.kernels.linked_experts`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from hetero_llm.bridge.expert_mailbox import LINKED_UNIT, WHOLES, LinkPart
from hetero_llm.bridge.host_experts import HostLayer, HostMatrices
from hetero_llm.gpu.kernels.activation import gate_form
from hetero_llm.gpu.kernels.expert_requests import NOWHERE, ON_HOST
from hetero_llm.gpu.kernels.experts import gated, serves
from hetero_llm.gpu.kernels.launch import (
    IN_INTERPRETER,
    num_multiprocessors,
    pdl_options,
    wait_and_release,
)
from hetero_llm.gpu.kernels.quantized_elements import FP8, INT4, INT8, KIND_CODES
from hetero_llm.models.config import Gate
from hetero_llm.models.layers import GatedActivation
from hetero_llm.quantization.matrix import QuantizedMatrix, dequantize

MOST_TOKENS = 16
"""Of a step: a tile of the tensor cores. Longer steps leave no part to the kernels here."""

_PLAIN = -1
"""In place of a `KIND_CODES`: numbers that need no scale."""

_FEATURES, _ROW_BYTES, _WARPS = 64, 128, 4
"""Rows of weights of a tile, 16 for each warp: few, so that one expert makes enough programs. What
a tile reads of a row is one request to the link."""

_PER_ROW = 0
"""In place of a group: one scale for all columns of a row."""

_MOST_PAIRS = 256
_TENSORS = ("data", "scale", "zero", "offset", "row_scale")
_NUMBERS = (torch.float32, torch.float16, torch.bfloat16)

_ON_HOST, _NOWHERE = tl.constexpr(ON_HOST), tl.constexpr(NOWHERE)
_TOKENS, _UNSCALED = tl.constexpr(MOST_TOKENS), tl.constexpr(_PLAIN)
_WHOLES = tl.constexpr(WHOLES)


@triton.jit
def _value_of_code(code, KIND: tl.constexpr):
    """Numbers that codes stand for, in float32, by their bits; those of int4 count from 0."""
    if KIND == FP8:
        # e4m3: exponents move, and numbers below the first exponent get one whose value comes off.
        absolute = code & 127
        small = absolute < 8
        bits = (absolute << 20) + (120 << 23) + tl.where(small, 1 << 23, 0)
        size = bits.to(tl.float32, bitcast=True) - tl.where(small, 0.015625, 0.0)
        size = tl.where(absolute == 127, float("nan"), size)
        return tl.where(code >= 128, -size, size)
    elif KIND == INT8:
        return ((code ^ 128) - 128).to(tl.float32)
    elif KIND == INT4:
        return code.to(tl.float32)
    else:
        # e2m1
        exponent = (code >> 1) & 3
        half = code & 1
        bits = ((exponent + 126) << 23) | (half << 22)
        size = tl.where(exponent == 0, 0.5 * half.to(tl.float32), bits.to(tl.float32, bitcast=True))
        return tl.where(code >= 8, -size, size)


@triton.jit
def _of_groups(
    pointer, rows, there, first, groups,
    GROUP: tl.constexpr, TILE: tl.constexpr, LANES: tl.constexpr,
):  # fmt: skip
    """Scales, points or offsets of a tile's elements: [rows, LANES]; [rows, 1] if they share one.

    Args:
        first: column at which the tile begins.
    """
    COUNT: tl.constexpr = 1 if GROUP == 0 or GROUP >= TILE else TILE // GROUP
    group = first // GROUP if GROUP > 0 else 0
    numbers = group + tl.arange(0, COUNT)
    inside = there[:, None] & (numbers < groups)[None, :]
    found = tl.load(pointer + rows[:, None] * groups + numbers[None, :], mask=inside, other=0)
    found = found.to(tl.float32)
    if COUNT == 1:
        return found
    else:
        ROWS: tl.constexpr = found.shape[0]
        EACH: tl.constexpr = LANES // COUNT
        return tl.broadcast_to(found[:, :, None], (ROWS, COUNT, EACH)).reshape(ROWS, LANES)


@triton.jit
def _multiply(sums, values, x, DTYPE: tl.constexpr, IS_EXACT: tl.constexpr):
    """sums + values @ x for float32 values; see the module. IS_EXACT: 16 bits hold them."""
    if IN_INTERPRETER or tl.float32 == DTYPE:
        return tl.dot(values, x.to(tl.float32), sums, input_precision="ieee")
    else:
        high = values.to(DTYPE)
        if IS_EXACT:
            return tl.dot(high, x, sums)
        low = (values - high.to(tl.float32)).to(DTYPE)
        return tl.dot(low, x, tl.dot(high, x, sums))


@triton.jit
def _add_tile(
    sums, x, x_rows, x_there, x_first, data, scale, zero, offset, rows, there, begin, end, width,
    groups,
    KIND: tl.constexpr, GROUP: tl.constexpr, SCALE_ROWS: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """sums + the products of columns [begin, begin + TILE) before `end`, that of the matrix. Scales
    of whole rows are left out.

    Args:
        sums: [features, tokens] float32.
        x: inputs; x_rows [tokens] offsets of their rows, x_there which there are, x_first the
            column of the matrix that a row begins with.
        data, scale, zero, offset: of the expert; None where there are none.
        rows, there: [features] of the matrix.
        width: elements of `data` in a row.
    """
    DTYPE: tl.constexpr = x.dtype.element_ty
    PARTS: tl.constexpr = 2 if KIND >= INT4 else 1
    LANES: tl.constexpr = TILE // PARTS
    lanes = tl.arange(0, LANES)
    places = begin // PARTS + lanes
    inside = there[:, None] & (places < width)[None, :]
    codes = tl.load(data + rows[:, None] * width + places[None, :], mask=inside, other=0)
    if KIND != _UNSCALED:
        if GROUP > 0:
            factor = _of_groups(
                scale, rows // SCALE_ROWS, there, begin, groups, GROUP, TILE, LANES
            )  # fmt: skip
        if zero is not None:
            point = _of_groups(zero, rows, there, begin, groups, GROUP, TILE, LANES)
        if offset is not None:
            shift = _of_groups(offset, rows, there, begin, groups, GROUP, TILE, LANES)
    for part in tl.static_range(PARTS):
        columns = begin + PARTS * lanes + part
        met = (columns < end)[:, None] & x_there[None, :]
        inputs = tl.load(x + x_rows[None, :] + (columns - x_first)[:, None], mask=met, other=0.0)
        if KIND == _UNSCALED:
            if IN_INTERPRETER or tl.float32 == DTYPE:
                sums = _multiply(sums, codes.to(tl.float32), inputs, DTYPE, True)
            else:
                sums = tl.dot(codes, inputs, sums)
        else:
            code = codes.to(tl.int32)
            if PARTS == 2:
                code = (code >> (4 * part)) & 15
            values = _value_of_code(code, KIND)
            if KIND == INT4:
                if zero is not None:
                    values -= point
                elif offset is None:
                    values -= 8.0
            if GROUP > 0:
                values *= factor
            if offset is not None:
                values += shift
            sums = _multiply(sums, values, inputs, DTYPE, GROUP == 0)
    return sums


@triton.jit
def _scale_rows(
    sums, scale, row_scale, rows, there, scales, height,
    GROUP: tl.constexpr, SCALE_ROWS: tl.constexpr,
):  # fmt: skip
    """sums times the scales that whole rows have.

    Args:
        scales, height: places of the expert's first ones in `scale` and in `row_scale`.
    """
    if scale is not None and GROUP == 0:
        own = tl.load(scale + scales + rows // SCALE_ROWS, mask=there, other=0.0)
        sums *= own.to(tl.float32)[:, None]
    if row_scale is not None:
        sums *= tl.load(row_scale + height + rows, mask=there, other=0.0)[:, None]
    return sums


@triton.jit
def _experts_on_host(ids, slots, num_pairs, whole, PAIRS: tl.constexpr):
    """[PAIRS] experts on the host; [PAIRS] numbers of those of which a part is computed here, at
    the first pair of each, else -1; how many these are; and how many are on the host.

    Args:
        whole: `LinkPart.whole`, or `WHOLES`: all.
    """
    lanes = tl.arange(0, PAIRS)
    there = lanes < num_pairs
    slot = tl.load(slots + lanes, mask=there, other=_NOWHERE)
    expert = tl.load(ids + lanes, mask=there, other=-1).to(tl.int32)
    expert = tl.where(slot == _ON_HOST, expert, -1)
    earlier = (expert[None, :] == expert[:, None]) & (lanes[None, :] < lanes[:, None])
    is_first = (expert >= 0) & (tl.max(earlier.to(tl.int32), 1) == 0)
    # In ascending order; the team has those of the lowest numbers, as `Exchange::open` counts.
    lower = is_first[None, :] & (expert[None, :] < expert[:, None])
    different = tl.sum(is_first.to(tl.int32), 0)
    count = different * whole // _WHOLES
    numbers = tl.sum(lower.to(tl.int32), 1) - (different - count)
    return expert, tl.where(is_first & (numbers >= 0), numbers, -1), count, different


@triton.jit
def _pairs_of(ids, slots, expert, num_rows, K: tl.constexpr, K_LANES: tl.constexpr):
    """[tokens] the pair with which each token has chosen an expert of the host, or -1."""
    rows = tl.arange(0, _TOKENS)[:, None]
    lanes = tl.arange(0, K_LANES)[None, :]
    there = (rows < num_rows) & (lanes < K)
    pair = rows * K + lanes
    slot = tl.load(slots + pair, mask=there, other=_NOWHERE)
    own = tl.load(ids + pair, mask=there, other=-1).to(tl.int32)
    return tl.max(tl.where((own == expert) & (slot == _ON_HOST), pair, -1), 1)


# large: its arguments are half of it.
@triton.jit(do_not_specialize=["num_rows", "whole"])
def linked_gates_kernel(
    x,  # [num_rows, hidden], x_stride apart
    ids,  # [num_rows, K] int
    slots,  # [num_rows, K] int32, see Places
    places,  # [experts] int32 place in `data` of each expert; None: its own number
    data,  # [places, 2 * inner, width], in host memory, as are the next five: see HostMatrices
    scale,
    zero,
    offset,
    row_scale,
    bias,
    middle,  # [num_rows * K, inner - first]
    num_rows,
    hidden,
    inner,
    first,  # inner row
    width,
    groups,
    x_stride,
    whole,
    K: tl.constexpr,
    K_LANES: tl.constexpr,
    PAIRS: tl.constexpr,
    GATE: tl.constexpr,  # activation.GateForm
    KIND: tl.constexpr,
    GROUP: tl.constexpr,
    SCALE_ROWS: tl.constexpr,
    TILE: tl.constexpr,
    FEATURES: tl.constexpr,
    PROGRAMS: tl.constexpr,
    PDL: tl.constexpr,
):
    """Inner rows from `first` on of the experts on the host; grid (PROGRAMS)."""
    wait_and_release(PDL)
    DTYPE: tl.constexpr = x.dtype.element_ty
    experts, numbers, count, _ = _experts_on_host(ids, slots, num_rows * K, whole, PAIRS)
    strips = tl.cdiv(inner - first, FEATURES)
    tokens = tl.arange(0, _TOKENS)
    for index in tl.range(tl.program_id(0), count * strips, PROGRAMS, num_stages=1):
        expert = tl.sum(tl.where(numbers == index // strips, experts, 0), 0)
        pairs = _pairs_of(ids, slots, expert, num_rows, K, K_LANES)
        place = expert
        if places is not None:
            place = tl.load(places + expert)
        rows = first + (index % strips) * FEATURES + tl.arange(0, FEATURES)
        there = rows < inner
        own = data + place.to(tl.int64) * (2 * inner) * width
        height = expert.to(tl.int64) * tl.cdiv(2 * inner, SCALE_ROWS)
        scales, points, shifts = scale, zero, offset
        if scale is not None:
            scales = scale + height * groups
        if zero is not None:
            points = zero + height * groups
        if offset is not None:
            shifts = offset + height * groups
        gate = tl.zeros((FEATURES, _TOKENS), tl.float32)
        up = tl.zeros((FEATURES, _TOKENS), tl.float32)
        for begin in tl.range(0, hidden, TILE):
            gate = _add_tile(
                gate, x, tokens * x_stride, pairs >= 0, 0, own, scales, points, shifts, rows,
                there, begin, hidden, width, groups, KIND, GROUP, SCALE_ROWS, TILE,
            )  # fmt: skip
            up = _add_tile(
                up, x, tokens * x_stride, pairs >= 0, 0, own, scales, points, shifts, inner + rows,
                there, begin, hidden, width, groups, KIND, GROUP, SCALE_ROWS, TILE,
            )  # fmt: skip
        line = expert.to(tl.int64) * (2 * inner)
        gate = _scale_rows(
            gate, scale, row_scale, rows, there, height * groups, line, GROUP, SCALE_ROWS
        )  # fmt: skip
        up = _scale_rows(
            up, scale, row_scale, inner + rows, there, height * groups, line, GROUP, SCALE_ROWS
        )  # fmt: skip
        if bias is not None:
            line = line + rows
            gate += tl.load(bias + line, mask=there, other=0.0).to(tl.float32)[:, None]
            up += tl.load(bias + inner + line, mask=there, other=0.0).to(tl.float32)[:, None]
        both = tl.permute(tl.join(gate, up), (2, 0, 1))
        result = gated(both, GATE, DTYPE).to(DTYPE)
        target = middle + (pairs * (inner - first))[None, :] + (rows - first)[:, None]
        tl.store(target, result, mask=there[:, None] & (pairs >= 0)[None, :])


@triton.jit(do_not_specialize=["num_rows", "whole"])
def linked_outputs_kernel(
    middle,  # see `linked_gates_kernel`, as are the next eight
    ids,
    slots,
    places,
    data,  # [places, hidden, width]
    scale,
    zero,
    offset,
    row_scale,
    bias,  # [experts, hidden], of whole experts; None
    weights,  # [num_rows, K] float32
    y,  # [num_rows, hidden] float32
    num_rows,
    hidden,
    inner,
    first,
    width,
    groups,
    whole,
    K: tl.constexpr,
    K_LANES: tl.constexpr,
    PAIRS: tl.constexpr,
    KIND: tl.constexpr,
    GROUP: tl.constexpr,
    SCALE_ROWS: tl.constexpr,
    TILE: tl.constexpr,
    FEATURES: tl.constexpr,
    PROGRAMS: tl.constexpr,
    PDL: tl.constexpr,
):
    """Weighted sums over the experts on the host, in ascending order, of the inner rows from
    `first` on; grid (PROGRAMS)."""
    wait_and_release(PDL)
    experts, numbers, count, different = _experts_on_host(
        ids, slots, num_rows * K, whole, PAIRS
    )  # fmt: skip
    strips = tl.cdiv(hidden, FEATURES)
    if different == 0:
        strips = 0
    tokens = tl.arange(0, _TOKENS)
    for strip in tl.range(tl.program_id(0), strips, PROGRAMS, num_stages=1):
        rows = strip * FEATURES + tl.arange(0, FEATURES)
        there = rows < hidden
        total = tl.zeros((FEATURES, _TOKENS), tl.float32)
        for number in tl.range(0, count, num_stages=1):
            expert = tl.sum(tl.where(numbers == number, experts, 0), 0)
            pairs = _pairs_of(ids, slots, expert, num_rows, K, K_LANES)
            chosen = pairs >= 0
            place = expert
            if places is not None:
                place = tl.load(places + expert)
            own = data + place.to(tl.int64) * hidden * width
            height = expert.to(tl.int64) * tl.cdiv(hidden, SCALE_ROWS)
            scales, points, shifts = scale, zero, offset
            if scale is not None:
                scales = scale + height * groups
            if zero is not None:
                points = zero + height * groups
            if offset is not None:
                shifts = offset + height * groups
            sums = tl.zeros((FEATURES, _TOKENS), tl.float32)
            for begin in tl.range(first, inner, TILE):
                sums = _add_tile(
                    sums, middle, pairs * (inner - first), chosen, first, own, scales, points,
                    shifts, rows, there, begin, inner, width, groups, KIND, GROUP, SCALE_ROWS,
                    TILE,
                )  # fmt: skip
            line = expert.to(tl.int64) * hidden
            sums = _scale_rows(
                sums, scale, row_scale, rows, there, height * groups, line, GROUP, SCALE_ROWS
            )  # fmt: skip
            if bias is not None:
                sums += tl.load(bias + line + rows, mask=there, other=0.0).to(tl.float32)[:, None]
            total += sums * tl.load(weights + pairs, mask=chosen, other=0.0)[None, :]
        target = y + (tokens * hidden)[None, :] + rows[:, None]
        tl.store(target, total, mask=there[:, None] & (tokens < num_rows)[None, :])


@dataclass(frozen=True, slots=True)
class _Form:
    """How a matrix is read: constants of a kernel, and its `_TENSORS`."""

    kind: int
    group: int
    scale_rows: int
    tile: int
    groups: int
    tensors: tuple[Tensor | None, ...]

    @property
    def width(self) -> int:
        """Elements of `data` in a row."""
        data = self.tensors[0]
        assert data is not None
        return int(data.shape[2])

    def arguments(self) -> dict[str, Any]:
        """Those of both kernels, by name."""
        tensors = dict(zip(_TENSORS, self.tensors, strict=True))
        return {**tensors, "width": self.width, "groups": self.groups, "KIND": self.kind,
                "GROUP": self.group, "SCALE_ROWS": self.scale_rows, "TILE": self.tile,
                "FEATURES": _FEATURES}  # fmt: skip


def _form_of(matrices: HostMatrices) -> _Form:
    if matrices.scale is None:
        tile = _ROW_BYTES // matrices.data.element_size()
        return _Form(_PLAIN, _PER_ROW, 1, tile, 0, (matrices.data, None, None, None, None))
    assert matrices.kind in KIND_CODES
    kind = KIND_CODES[matrices.kind]
    is_row = matrices.group >= matrices.columns
    group = _PER_ROW if is_row else matrices.group
    tile = _ROW_BYTES * (2 if matrices.kind in ("int4", "fp4") else 1)
    if group > LINKED_UNIT:
        tile = min(tile, LINKED_UNIT)  # a tile of `down` may begin at any unit, and has one group
    tensors = (
        matrices.data.view(torch.uint8), matrices.scale, matrices.zero, matrices.offset,
        matrices.row_scale,
    )  # fmt: skip
    return _Form(kind, group, matrices.scale_rows, tile, int(matrices.scale.shape[2]), tensors)


def why_not_linked(layer: HostLayer, k: int, activation: Gate) -> str | None:
    """Why the kernels cannot compute a part of these experts; None if they can.

    Args:
        k: experts of a token.
    """
    if not serves(activation):
        return f"no kernel of the GPU has the experts' activation, {activation}"
    if k > _MOST_PAIRS // MOST_TOKENS:
        return f"{k} experts a token are more than {_MOST_PAIRS // MOST_TOKENS}"
    if layer.down.columns <= LINKED_UNIT:
        return f"experts of {layer.down.columns} inner rows cannot be cut"
    for part in (layer.gate_up, layer.down):
        if part.kind == "nf4":
            return "nf4 experts are not read over the link"
        group = min(part.group, part.columns)
        whole = group in (0, part.columns) or group % LINKED_UNIT == 0
        if not whole and (group < 16 or LINKED_UNIT % group):
            return f"{part.kind} experts with groups of {group} are not read over the link"
        if part.offset is not None and group == part.columns:
            return "experts whose rows have one offset are not read over the link"
        if part.scale is not None and part.scale.dtype not in _NUMBERS:
            return f"experts with {part.scale.dtype} scales are not read over the link"
    return None


def linked_experts(
    x: Tensor,
    ids: Tensor,
    weights: Tensor,
    slots: Tensor,
    layer: HostLayer,
    *,
    part: LinkPart,
    activation: Gate,
    places: Tensor | None = None,
) -> Tensor:
    """Weighted sums of a part of the experts on the host.

    Args:
        x: [T, hidden], rows contiguous; at most `MOST_TOKENS` tokens.
        ids: [T, k] int, contiguous; an expert at most once for each token.
        weights: [T, k] float32, contiguous.
        slots: [T, k] int32: `ON_HOST` where the expert is the host's; see `expert_requests.Places`.
        layer: in page-locked memory if x is on a device; see `why_not_linked`.
        part: not `NO_PART`; if it is `rows`, not all of them.
        places: [experts] int32 on the device: where `data` has each expert of the host; None: at
            its own number.

    Returns:
        [T, hidden] float32; undefined if no token has an expert on the host. Biases of `down` are
        the threads' where they have a part of the expert.
    """
    (rows, k), hidden = ids.shape, x.shape[1]
    inner = layer.down.columns
    first = inner - part.rows if part.rows else 0
    whole = WHOLES if part.rows else part.whole
    assert 0 < rows <= MOST_TOKENS and x.stride(1) == 1
    assert ids.is_contiguous() and slots.is_contiguous() and weights.is_contiguous()
    assert weights.dtype == torch.float32 and slots.dtype == torch.int32
    assert (part.rows > 0) != (part.whole > 0) and part.whole < WHOLES
    assert not part.rows or (first > 0 and first % LINKED_UNIT == 0)
    assert layer.gate_up.columns == layer.down.rows == hidden
    assert layer.gate_up.scale is not None or layer.gate_up.data.dtype == x.dtype
    assert layer.down.scale is not None or layer.down.data.dtype == x.dtype
    assert (places is None) == (layer.gate_up.places is None)
    assert why_not_linked(layer, k, activation) is None
    middle = torch.empty((rows * k, inner - first), dtype=x.dtype, device=x.device)
    y = torch.empty((rows, hidden), dtype=torch.float32, device=x.device)
    gate_up, down = _form_of(layer.gate_up), _form_of(layer.down)
    few = rows * k <= 16
    shared = {
        "middle": middle,
        "ids": ids,
        "slots": slots,
        "places": places,
        "num_rows": rows,
        "hidden": hidden,
        "inner": inner,
        "first": first,
        "whole": whole,
        "K": k,
        "K_LANES": triton.next_power_of_2(k),
        # Two sizes, so that few kernels are compiled.
        "PAIRS": 16 if few else triton.next_power_of_2(MOST_TOKENS * k),
        "PROGRAMS": num_multiprocessors(x.device),
        "num_warps": _WARPS,
        **pdl_options(x.device),
    }
    grid = (num_multiprocessors(x.device),)
    linked_gates_kernel[grid](
        x=x,
        x_stride=x.stride(0),
        bias=layer.gate_up.bias,
        GATE=gate_form(activation),
        **gate_up.arguments(),
        **shared,
    )
    linked_outputs_kernel[grid](
        weights=weights,
        y=y,
        bias=None if part.rows else layer.down.bias,
        **down.arguments(),
        **shared,
    )
    return y


def linked_experts_reference(
    x: Tensor,
    ids: Tensor,
    weights: Tensor,
    slots: Tensor,
    layer: HostLayer,
    *,
    part: LinkPart,
    activation: Gate,
    places: Tensor | None = None,
) -> Tensor:
    """`linked_experts` in plain torch, in float32 on the host; zeros of tokens that miss none."""
    gate, inner = GatedActivation(activation), layer.down.columns
    first = inner - part.rows if part.rows else 0
    different = ids[slots == ON_HOST].unique().tolist()
    count = len(different) if part.rows else len(different) * part.whole // WHOLES
    here = different[len(different) - count :]
    y = torch.zeros((len(x), x.shape[1]), dtype=torch.float32)
    for row, j in (slots == ON_HOST).nonzero().tolist():
        expert = int(ids[row, j])
        if expert not in here:
            continue
        place = expert if places is None else int(places[expert])
        both = _dense(layer.gate_up, expert, place) @ x[row].float().cpu()
        if layer.gate_up.bias is not None:
            both = both + layer.gate_up.bias[expert].float()
        middle = gate.plain(both.to(x.dtype).unsqueeze(0))[0]
        columns = _dense(layer.down, expert, place)[:, first:]
        outputs = columns @ middle[first:].float()
        if layer.down.bias is not None and not part.rows:
            outputs = outputs + layer.down.bias[expert].float()
        y[row] += float(weights[row, j]) * outputs
    return y.to(x.device)


def _dense(matrices: HostMatrices, expert: int, place: int) -> Tensor:
    """[N, K] float32 of one expert."""
    data = matrices.data[place]
    if matrices.scale is None:
        return data.float()
    assert matrices.kind in KIND_CODES

    def own(tensor: Tensor | None) -> Tensor | None:
        return None if tensor is None else tensor[expert].contiguous()

    matrix = QuantizedMatrix(
        matrices.kind, data.contiguous(), matrices.scale[expert].contiguous(), matrices.group,
        matrices.scale_rows, own(matrices.zero), own(matrices.offset), own(matrices.row_scale),
    )  # fmt: skip
    return dequantize(matrix, torch.float32)
