"""Input buffers and results through page-locked memory, round after round, and the step's first
kernel, against the references."""

from __future__ import annotations

import pytest
import torch

from hetero_llm.gpu.kernels.exchange import (
    apply_step_inputs,
    apply_step_inputs_reference,
    fetch_pinned,
    fetch_pinned_reference,
    send_results,
    send_results_reference,
)


def on_host(*shape: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    return torch.zeros(shape, dtype=dtype, pin_memory=device.type == "cuda")


@pytest.mark.parametrize("words", [4, 1024, 3000])
def test_buffers_are_fetched_in_turn(words: int, device: torch.device) -> None:
    ring = on_host(4, 3004, dtype=torch.int32, device=device)
    turn = torch.zeros(1, dtype=torch.int32, device=device)
    out, expected = (torch.full((words,), -1, dtype=torch.int32, device=device) for _ in "ab")
    for step in range(6):
        ring[step % 4] = torch.arange(3004, dtype=torch.int32) + 7 * step  # the host fills it anew
        turn.fill_(step % 4)
        fetch_pinned(ring, turn, out=out)
        fetch_pinned_reference(ring, turn, out=expected)
        assert torch.equal(out, expected) and out[0] == 7 * step
        assert turn.item() == step % 4


@pytest.mark.parametrize("count", [1, 512, 1300])
def test_results_are_sent_in_turn(count: int, device: torch.device) -> None:
    ours, reference = (on_host(4, 1301, dtype=torch.int64, device=device) for _ in "ab")
    turn, reference_turn = (torch.zeros(1, dtype=torch.int32, device=device) for _ in "ab")
    for step in range(6):
        results = (torch.arange(count) * 2**33 + step).to(device)
        send_results(results, turn, ring=ours)
        send_results_reference(results, reference_turn, ring=reference)
        if device.type == "cuda":
            torch.cuda.synchronize()
        assert (
            torch.equal(ours, reference) and turn.item() == reference_turn.item() == (step + 1) % 4
        )
        assert ours[step % 4, count - 1] == (count - 1) * 2**33 + step


@pytest.mark.parametrize(("rows", "capacity", "used"), [(3, 7, 5), (300, 4, 0), (1, 600, 600)])
def test_step_inputs(rows: int, capacity: int, used: int, device: torch.device) -> None:
    torch.manual_seed(rows)
    slots, columns = 30, 40
    block_tables = torch.randint(0, 99, (slots, columns), dtype=torch.int32)
    token_ids = torch.randint(-1, 3, (rows,), dtype=torch.int32)
    token_slots = torch.randint(0, slots, (rows,), dtype=torch.int32)
    last = torch.randint(1000, 9999, (slots,))
    places = torch.randperm(slots * columns)[:capacity]
    writes = torch.stack((places // columns, places % columns, places + 100)).to(torch.int32)
    write_count = torch.tensor([used], dtype=torch.int32)
    expected_tables = block_tables.clone()
    arguments = (token_ids, token_slots, last)
    turns = torch.tensor([rows % 4], dtype=torch.int32)
    ours_turns = turns.to(device, copy=True)
    expected = apply_step_inputs_reference(
        *arguments, expected_tables, writes, write_count, turns, 4
    )
    ours = block_tables.to(device)
    out = torch.full((rows,), -7, dtype=torch.int32, device=device)
    apply_step_inputs(
        *(t.to(device) for t in arguments),
        ours,
        writes.to(device),
        write_count.to(device),
        turn=ours_turns,
        ring_size=4,
        out=out,
    )
    assert ours_turns.tolist() == turns.tolist() == [(rows + 1) % 4]
    assert torch.equal(out.cpu(), expected)
    assert torch.equal(ours.cpu(), expected_tables)
