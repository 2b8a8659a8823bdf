"""The bench of attention asks the engine for its tiles."""

from __future__ import annotations

import torch

from bench.kernels.attention import LLAMA, context_of


def test_tiles_are_those_of_the_engine() -> None:
    context = context_of(LLAMA, torch.device("cpu"))
    assert context.decode_tile(1, short=False).rows >= LLAMA.heads // LLAMA.kv_heads
    assert context.decode_tile(1, short=False) != context.decode_tile(128, short=False)
