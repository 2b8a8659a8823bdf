"""bench/speculation/replay_worker.py: what it counts, on short outputs."""

from __future__ import annotations

import argparse

import numpy as np
import pytest

from bench.speculation import replay_worker
from bench.speculation.replay_worker import SPAN, Player, figures, until_loop
from hetero_llm.demo_models import heldout_prompts


def test_outputs_end_where_they_begin_to_loop() -> None:
    text = list(range(SPAN + 8))
    assert until_loop(text) == text
    assert until_loop([*text, *text]) == text
    assert until_loop([7] * 2 * SPAN) == [7]
    assert until_loop([]) == []


@pytest.fixture(scope="module")
def args() -> argparse.Namespace:
    return argparse.Namespace(
        prompt=64, tokens=24, draft_steps=replay_worker.DRAFT_STEPS, draft_tokens=4,
        verify=replay_worker.VERIFY, gap=0.5, prefill=40.0, overlap="auto",
    )  # fmt: skip


def test_the_same_counts_every_time(args: argparse.Namespace) -> None:
    held = heldout_prompts()
    prompt, output = held.prompts[3, -64:].tolist(), held.continuations[3, :24].tolist()
    sums = [Player(args).play(5, prompt, output, temperature=heat) for heat in (0.0, 0.0, 0.7)]
    assert sums[0] == sums[1] and sums[0] != sums[2]
    for one in sums:
        assert one["tokens"] == len(output) - 1 == one["steps"] + one["accepted"]
        assert one["accepted"] <= one["drafted"]
        found = figures([one, one])
        assert 1.0 <= found["tokens/step"] <= 1 + args.draft_tokens
        assert np.isclose(found["tokens/step"], one["tokens"] / one["steps"])


def test_enumerate_never_waits(args: argparse.Namespace) -> None:
    held = heldout_prompts()
    prompt, output = held.prompts[4, -64:].tolist(), held.continuations[4, :24].tolist()
    given = argparse.Namespace(**{**vars(args), "overlap": "enumerate"})
    sums = Player(given).play(5, prompt, output, temperature=0.0)
    assert sums["waited"] == 0.0 and sums["plain"] >= sums["misses"] > 0
