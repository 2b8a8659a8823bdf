"""The first kernel of a step against its twin."""

from __future__ import annotations

import pytest
import torch

from hetero_llm.gpu.kernels.apply_step_inputs import apply_step_inputs, apply_step_inputs_reference


@pytest.mark.parametrize(("rows", "capacity", "used"), [(3, 7, 5), (300, 4, 0), (1, 600, 600)])
def test_step_inputs(rows: int, capacity: int, used: int, device: torch.device) -> None:
    torch.manual_seed(rows)
    slots, columns = 30, 40
    tables = torch.randint(0, 99, (slots, columns), dtype=torch.int32)
    token_ids = torch.randint(-1, 3, (rows,), dtype=torch.int32)
    row_slots = torch.randint(0, slots, (rows,), dtype=torch.int32)
    last = torch.randint(1000, 9999, (slots,))
    places = torch.randperm(slots * columns)[:capacity]
    writes = torch.stack((places // columns, places % columns, places + 100)).to(torch.int32)
    num_writes = torch.tensor([used], dtype=torch.int32)
    expected_tables = tables.clone()
    arguments = (token_ids, row_slots, last)
    turns = torch.tensor([rows % 4], dtype=torch.int32)
    ours_turns = turns.to(device, copy=True)
    expected = apply_step_inputs_reference(
        *arguments, expected_tables, writes, num_writes, turns, 4
    )
    ours = tables.to(device)
    out = torch.full((rows,), -7, dtype=torch.int32, device=device)
    apply_step_inputs(
        *(t.to(device) for t in arguments),
        ours,
        writes.to(device),
        num_writes.to(device),
        turn=ours_turns,
        ring_size=4,
        out=out,
    )
    assert ours_turns.tolist() == turns.tolist() == [(rows + 1) % 4]
    assert torch.equal(out.cpu(), expected)
    assert torch.equal(ours.cpu(), expected_tables)
