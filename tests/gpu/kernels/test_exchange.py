"""Packets and results through page-locked memory, round after round, against the twins."""

from __future__ import annotations

import pytest
import torch

from hetero_llm.gpu.kernels.exchange import (
    fetch_packet,
    fetch_packet_reference,
    send_results,
    send_results_reference,
)


def on_host(*shape: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    return torch.zeros(shape, dtype=dtype, pin_memory=device.type == "cuda")


@pytest.mark.parametrize("words", [4, 1024, 3000])
def test_packets_are_fetched_in_turn(words: int, device: torch.device) -> None:
    ring = on_host(4, 3004, dtype=torch.int32, device=device)
    turn = torch.zeros(1, dtype=torch.int32, device=device)
    out, expected = (torch.full((words,), -1, dtype=torch.int32, device=device) for _ in "ab")
    for step in range(6):
        ring[step % 4] = torch.arange(3004, dtype=torch.int32) + 7 * step  # the host fills it anew
        turn.fill_(step % 4)
        fetch_packet(ring, turn, out=out)
        fetch_packet_reference(ring, turn, out=expected)
        assert torch.equal(out, expected) and out[0] == 7 * step
        assert turn.item() == step % 4


@pytest.mark.parametrize("count", [1, 512, 1300])
def test_results_are_sent_in_turn(count: int, device: torch.device) -> None:
    ours, twin = (on_host(4, 1301, dtype=torch.int64, device=device) for _ in "ab")
    turn, twin_turn = (torch.zeros(1, dtype=torch.int32, device=device) for _ in "ab")
    for step in range(6):
        results = (torch.arange(count) * 2**33 + step).to(device)
        send_results(results, turn, ring=ours)
        send_results_reference(results, twin_turn, ring=twin)
        if device.type == "cuda":
            torch.cuda.synchronize()
        assert torch.equal(ours, twin) and turn.item() == twin_turn.item() == (step + 1) % 4
        assert ours[step % 4, count - 1] == (count - 1) * 2**33 + step
