"""Exchanges between ranks against plain torch. One process has the memory of all ranks and runs one
part of a launch for each of them, then the next part; two processes run whole launches."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from hetero_llm.gpu.kernels.collectives import (
    ALL,
    COLLECT,
    GAVE_UP,
    NOT_YET_BITS,
    PUSH,
    TAKE,
    TILE_BYTES,
    Norm,
    Patience,
    ReceiveBuffer,
    gather_columns,
    gather_columns_kernel,
    gathered_rows,
    sum_reference,
    sum_rows,
    sum_rows_kernel,
    two_shot_elements,
    two_shot_sum,
    two_shot_sum_kernel,
)
from hetero_llm.gpu.kernels.launch import INTERPRETED
from hetero_llm.gpu.kernels.norm import add_gemma_rms_norm, add_rms_norm
from tests.helpers.compiled import printed_kernels
from tests.helpers.fork_server import run_processes

DTYPES = [torch.bfloat16, torch.float16, torch.float32]
LOOKS = 3


@dataclass
class Ranks:
    """Every rank's view of the same memories."""

    buffers: list[ReceiveBuffer]
    patience: list[Patience]

    @classmethod
    def make(
        cls, size: int, pieces: int, piece_bytes: int, device: torch.device, looks: int = LOOKS
    ) -> Ranks:
        words = ReceiveBuffer.num_bytes(size, pieces, piece_bytes) // 2
        memories = tuple(
            torch.full((words,), NOT_YET_BITS, dtype=torch.int16, device=device)
            for _ in range(size)
        )
        buffers, patience = [], []
        for rank in range(size):
            turns = torch.zeros(pieces, dtype=torch.int32, device=device)
            buffers.append(ReceiveBuffer(memories, turns, rank, piece_bytes))
            errors = torch.zeros(1, dtype=torch.int32, pin_memory=device.type == "cuda")
            control = torch.tensor([looks, 0], dtype=torch.int32, device=device)
            patience.append(Patience(control, errors))
        return cls(buffers, patience)

    def sum_rows(self, xs: list[Tensor]) -> list[Tensor]:
        for x, buffer, patience in zip(xs, self.buffers, self.patience, strict=True):
            sum_rows(x, buffer, patience, phases=PUSH)
        return [
            sum_rows(x, buffer, patience, phases=TAKE)[0]
            for x, buffer, patience in zip(xs, self.buffers, self.patience, strict=True)
        ]

    def assert_quiet(self) -> None:
        """Nothing is left behind, and nobody gave up."""
        for buffer, patience in zip(self.buffers, self.patience, strict=True):
            assert bool((buffer.memories[buffer.rank] == NOT_YET_BITS).all())
            assert torch.equal(buffer.turns, self.buffers[0].turns)
            assert patience.control[GAVE_UP] == patience.errors[0] == 0


def inputs(size: int, *shape: int, dtype: torch.dtype, device: torch.device) -> list[Tensor]:
    return [torch.randn(shape, device=device).to(dtype) for _ in range(size)]


def same_bits(a: Tensor, b: Tensor) -> bool:
    return torch.equal(a.view(torch.uint8), b.view(torch.uint8))


def assert_sum(found: list[Tensor], xs: list[Tensor]) -> None:
    """All ranks have the reference's sum, bit by bit; the interpreter cuts bfloat16 off instead of
    rounding it."""
    expected = sum_reference(xs)
    assert all(same_bits(one, found[0]) for one in found)
    if INTERPRETED and expected.dtype == torch.bfloat16:
        torch.testing.assert_close(found[0], expected, rtol=2**-7, atol=0.0)
    else:
        assert same_bits(found[0], expected)


# Types meet one odd shape, bfloat16 all of them.
@pytest.mark.parametrize(
    ("size", "rows", "n", "dtype"),
    [
        *((2, 9, 100, dtype) for dtype in DTYPES),
        *((*shape, torch.bfloat16) for shape in ((2, 1, 4096), (3, 5, 7), (4, 6, 96), (8, 3, 130))),
    ],
)
def test_rows_are_summed(
    size: int, rows: int, n: int, dtype: torch.dtype, device: torch.device
) -> None:
    torch.manual_seed(n)
    ranks = Ranks.make(size, 12, 128 * -(-n * dtype.itemsize // 128), device)
    for _ in range(3):  # each piece's places are used twice
        xs = inputs(size, rows, n, dtype=dtype, device=device)
        assert_sum(ranks.sum_rows(xs), xs)
    assert ranks.buffers[0].turns.tolist() == [1] * rows + [0] * (12 - rows)
    ranks.assert_quiet()


@pytest.mark.parametrize(
    ("size", "rows", "n", "gemma", "has_residual", "dtype"),
    [
        *((2, 1, 768, gemma, has_residual, dtype)
          for gemma in (False, True) for has_residual in (True, False) for dtype in DTYPES),
        (4, 3, 100, False, True, torch.bfloat16),
        (4, 3, 100, True, False, torch.float32),
    ],
)  # fmt: skip
def test_norm_of_a_sum_is_that_of_two_launches(
    *, size: int, rows: int, n: int, dtype: torch.dtype, gemma: bool, has_residual: bool,
    device: torch.device,
) -> None:  # fmt: skip
    torch.manual_seed(rows)
    ranks = Ranks.make(size, 8, 4096, device)
    weight = torch.randn(n, device=device).to(dtype)
    norm = Norm(weight, 1e-5, gemma)
    first = torch.randn(rows, n, device=device).to(dtype) if has_residual else None
    residuals = [None if first is None else first.clone() for _ in range(size)]
    plain = add_gemma_rms_norm if gemma else add_rms_norm
    for _ in range(2):
        xs = inputs(size, rows, n, dtype=dtype, device=device)
        summed = ranks.sum_rows(xs)[0]
        for x, buffer, patience in zip(xs, ranks.buffers, ranks.patience, strict=True):
            sum_rows(x, buffer, patience, norm=norm, phases=PUSH)
        expected, expected_total = plain(summed, first, weight, 1e-5)
        for rank, x in enumerate(xs):
            out, total = sum_rows(
                x,
                ranks.buffers[rank],
                ranks.patience[rank],
                norm=norm,
                residual=residuals[rank],
                phases=TAKE,
            )
            assert total is residuals[rank] or first is None
            assert same_bits(total, expected_total)
            if INTERPRETED:
                assert same_bits(out, expected)
            else:  # programs of other sizes add the squares in another order
                torch.testing.assert_close(out, expected, rtol=2**-7, atol=1e-5)
    ranks.assert_quiet()


@settings(max_examples=10, deadline=None)
@given(
    launches=st.lists(
        st.tuples(st.integers(1, 9), st.integers(1, 64), st.sampled_from(DTYPES)), max_size=5
    ),
    size=st.integers(2, 4),
    seed=st.integers(0, 99),
)
def test_any_launches_in_any_order(
    launches: list[tuple[int, int, torch.dtype]], size: int, seed: int
) -> None:
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    torch.manual_seed(seed)
    ranks = Ranks.make(size, 9, 256, device)
    for rows, n, dtype in launches:
        xs = inputs(size, rows, n, dtype=dtype, device=device)
        assert_sum(ranks.sum_rows(xs), xs)
    ranks.assert_quiet()


@pytest.mark.parametrize("dtype", DTYPES)
def test_no_value_looks_as_if_it_had_not_arrived(dtype: torch.dtype, device: torch.device) -> None:
    """NaNs of all bits, infinities and both zeros arrive."""
    bits = torch.int32 if dtype.itemsize == 4 else torch.int16
    marked = torch.full((2, 64), NOT_YET_BITS, dtype=bits).view(dtype)
    marked[0, :4] = torch.tensor([torch.inf, -torch.inf, 0.0, -0.0])
    plain = torch.ones(2, 64, dtype=dtype)
    plain[0, 2:4] = -0.0
    xs = [marked.to(device), plain.to(device)]
    ranks = Ranks.make(2, 2, 256, device)
    found = ranks.sum_rows(xs)
    assert same_bits(*found)
    rest = found[0].flatten()[4:]
    assert found[0][0, :2].tolist() == [torch.inf, -torch.inf] and rest.isnan().all()
    assert found[0][0, 2:4].signbit().tolist() == [False, True]
    ranks.assert_quiet()


def test_a_launch_gives_up_and_later_ones_do_not_wait(device: torch.device) -> None:
    torch.manual_seed(0)
    ranks = Ranks.make(2, 4, 256, device)
    xs = inputs(2, 3, 64, dtype=torch.float16, device=device)
    sum_rows(xs[0], ranks.buffers[0], ranks.patience[0])  # rank 1 never comes
    if device.type == "cuda":
        torch.cuda.synchronize()
    patience = ranks.patience[0]
    assert patience.control.tolist() == [LOOKS, 1] and patience.errors.tolist() == [1]
    assert ranks.patience[1].errors.tolist() == [0]
    patience.control[0] = 2**31 - 1  # would take half an hour
    sum_rows(xs[0], ranks.buffers[0], patience)
    x = torch.ones(1, 64, dtype=torch.float16, device=device)
    tiles = Ranks.make(2, 4, TILE_BYTES, device).buffers
    gather_columns(x, x.new_empty(1, 128), tiles[0], patience=patience)
    two_shot_sum(x, torch.empty_like(x), tiles[0], tiles[0], patience=patience)


@pytest.mark.parametrize(
    ("size", "count", "dtype"),
    [
        *((2, count, dtype) for count in (3, 20_000) for dtype in DTYPES),
        (8, 33_333, torch.bfloat16),
        (4, 16_384, torch.float32),
    ],
)
def test_shares_are_summed_and_sent(
    size: int, count: int, dtype: torch.dtype, device: torch.device
) -> None:
    torch.manual_seed(count)
    parts = Ranks.make(size, 8, TILE_BYTES, device)
    sums = Ranks.make(size, 8, TILE_BYTES, device)
    assert count <= two_shot_elements(parts.buffers[0], dtype)
    for _ in range(3):
        xs = inputs(size, count, dtype=dtype, device=device)
        xs[1][:1] = torch.nan
        outs = [torch.zeros_like(x) for x in xs]
        for phase in (PUSH, TAKE, COLLECT):
            for rank in range(size):
                two_shot_sum(
                    xs[rank],
                    outs[rank],
                    parts.buffers[rank],
                    sums.buffers[rank],
                    patience=parts.patience[rank],
                    phases=phase,
                )
        assert all(one[0].isnan() for one in outs)
        assert_sum([one[1:] for one in outs], [x[1:] for x in xs])
    parts.assert_quiet()
    assert all(bool((b.memories[0] == NOT_YET_BITS).all()) for b in sums.buffers)


@pytest.mark.parametrize(
    ("size", "rows", "n", "dtype"),
    [
        *((2, 7, 33, dtype) for dtype in DTYPES),
        *((*shape, torch.bfloat16) for shape in ((3, 2, 4097), (4, 5, 96), (8, 1, 640))),
        (2, 1, 5000, torch.float32),
    ],
)
def test_columns_are_gathered(
    size: int, rows: int, n: int, dtype: torch.dtype, device: torch.device
) -> None:
    torch.manual_seed(n)
    ranks = Ranks.make(size, 16, TILE_BYTES, device)
    assert rows <= gathered_rows(ranks.buffers[0], n, dtype)
    for _ in range(3):
        xs = inputs(size, rows, n, dtype=dtype, device=device)
        outs = [torch.full_like(xs[0], -7).repeat(1, size) for _ in range(size)]
        for phase in (PUSH, TAKE):
            for rank in range(size):
                gather_columns(
                    xs[rank],
                    outs[rank],
                    ranks.buffers[rank],
                    patience=ranks.patience[rank],
                    phases=phase,
                )
        expected = torch.cat(xs, dim=1)
        assert all(torch.equal(out, expected) for out in outs)
    ranks.assert_quiet()


def run_rank(
    rank: int, rows: ReceiveBuffer, tiles: ReceiveBuffer, sums: ReceiveBuffer, results: Tensor
) -> None:
    """A process: whole launches. Writes 1 for each that was right, and 1 if none gave up."""
    own = [
        ReceiveBuffer(one.memories, torch.zeros_like(one.turns), rank, one.piece_bytes)
        for one in (rows, tiles, sums)
    ]
    patience = Patience(torch.tensor([2**30, 0], dtype=torch.int32), torch.zeros(1).int())
    rng = np.random.default_rng(5)
    for launch in range(len(results[rank]) - 1):
        count, n = int(rng.integers(1, 8)), int(rng.integers(1, 64))
        values = rng.standard_normal((rows.size, count, n), np.float32)
        xs = list(torch.from_numpy(values))
        found = sum_rows(xs[rank], own[0], patience)[0]
        right = torch.equal(found, sum_reference(xs))
        out = torch.empty(count, n * rows.size)
        gather_columns(xs[rank], out, own[1], patience=patience)
        right = right and torch.equal(out, torch.cat(xs, dim=1))
        out = torch.empty_like(xs[0])
        two_shot_sum(xs[rank], out, own[1], own[2], patience=patience)
        results[rank, launch] = right and torch.equal(out, sum_reference(xs))
    results[rank, -1] = patience.errors[0] == 0


@pytest.mark.skipif(not INTERPRETED, reason="tests/two_gpus does this on devices")
def test_processes_wait_for_each_other() -> None:
    size, cpu = 2, torch.device("cpu")
    made = [Ranks.make(size, 8, piece_bytes, cpu).buffers[0] for piece_bytes in (256, *[8192] * 2)]
    results = torch.zeros(size, 7, dtype=torch.int32).share_memory_()
    for buffer in made:
        for memory in buffer.memories:
            memory.share_memory_()
    run_processes(run_rank, (*made, results), size)
    assert results.tolist() == [[1] * 7] * size


def test_what_the_compiler_makes_of_it() -> None:
    """Reads of what peers write go past the first-level cache at the scope of the system, writes to
    peers too, both 16 bytes wide."""
    kernels = printed_kernels(__name__)
    assert len(kernels) == 3
    for ptx in kernels:
        assert "ld.volatile.global.v4.b32" in ptx and "st.global.wt.v4.b32" in ptx
        narrow = ptx.count("ld.volatile.global.b")  # each wait also reads the word that ends it
        assert narrow in (1, 2) and "st.global.wt.b" not in ptx
        assert "griddepcontrol.wait" in ptx and "griddepcontrol.launch_dependents" in ptx


def print_ptx() -> None:
    """The kernels of rank 1 of 2 as compiled for Hopper, in a process without the interpreter."""
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource, compile

    bits, types = "*i16", {"out_ptr": "*bf16", "total_ptr": "*bf16", "weight_ptr": "*bf16"}
    words = dict.fromkeys(("turn_ptr", "control_ptr", "error_ptr", "rows"), "*i32")
    numbers = ("total", "n", "piece_stride", "sender_stride", "place_stride")
    types |= words | dict.fromkeys(numbers, "i32") | {"rows": "i32", "eps": "fp32"}
    constants = {"RANK": 1, "RANKS": 2, "PHASES": ALL, "PDL": True}
    rows = {"SIZE": 4096, "PADDED": 4096, "HAS_RESIDUAL": True, "GEMMA": False}
    kernels: list[tuple[Any, dict[str, Any]]] = [
        (sum_rows_kernel, rows),
        (two_shot_sum_kernel, {"TILE": 4096}),
        (gather_columns_kernel, {"TILE": 4096}),
    ]
    for kernel, more in kernels:
        fixed = {**constants, **more}
        signature: dict[str, object] = {}
        aligned: dict[tuple[int, ...], list[list[object]]] = {}
        for i, argument in enumerate(kernel.arg_names):
            of_peers = argument.endswith("peers")
            default = (bits, bits) if of_peers else bits
            signature[argument] = "constexpr" if argument in fixed else types.get(argument, default)
            if argument not in fixed and argument not in ("rows", "eps"):
                places = [(i, j) for j in range(2)] if of_peers else [(i,)]
                aligned |= dict.fromkeys(places, [["tt.divisibility", 16]])
        source = ASTSource(kernel, signature, fixed, aligned)
        made = compile(source, target=GPUTarget("cuda", 90, 32), options={"launch_pdl": True})
        print(made.asm["ptx"])
