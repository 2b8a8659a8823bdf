"""What hybrid mixtures measure at start: which experts tokens choose, and which parts of the link
are timed with them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path

import pytest
import torch

from hetero_llm.bridge.expert_mailbox import NO_PART, LinkPart
from hetero_llm.gpu.hybrid_experts import LinkedTimes, draw_experts
from hetero_llm.gpu.kernels.expert_requests import ON_HOST
from tests.helpers.hybrid import Hybrid, open_hybrid
from tests.scenarios.test_hybrid_experts import ASKS, checkpoint_of

EXPERTS, ROWS, K = 16, 50, 4
ROWS_PART, WHOLE = LinkPart(rows=64), LinkPart(whole=128)


@pytest.fixture(scope="module")
def device() -> torch.device:
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


def misses(in_bank: int, device: torch.device, *, one_miss: bool = True) -> list[int]:
    """Of each token, whose experts all differ, with that many experts of the layer in the bank."""
    torch.manual_seed(in_bank)
    table = torch.full((EXPERTS,), ON_HOST, dtype=torch.int32)
    table[torch.randperm(EXPERTS)[:in_bank]] = torch.arange(in_bank, dtype=torch.int32) + 7
    ids = draw_experts(table.to(device), ROWS, K, one_miss=one_miss).cpu()
    assert ids.shape == (ROWS, K) and ids.dtype == torch.int32 and ids.is_contiguous()
    assert all(len(set(row)) == K for row in ids.tolist())
    on_host = table == ON_HOST
    chosen = torch.zeros(EXPERTS, dtype=torch.bool)
    chosen[ids.flatten().long()] = True
    assert bool(chosen[~on_host].all())
    if in_bank >= EXPERTS // 2 or not one_miss:
        assert bool(chosen.all())  # as few experts on the host are not the same for all tokens
    return on_host[ids.long()].sum(1).tolist()


@pytest.mark.parametrize("in_bank", [K - 1, K, EXPERTS // 2, EXPERTS - 1])
def test_tokens_that_miss_one_expert(device: torch.device, in_bank: int) -> None:
    assert misses(in_bank, device) == [1] * ROWS


def test_tokens_miss_one_expert_as_far_as_the_table_allows(device: torch.device) -> None:
    assert misses(0, device) == [K] * ROWS
    assert misses(1, device) == [K - 1] * ROWS
    assert misses(EXPERTS, device) == [0] * ROWS


def test_tokens_that_choose_any_experts(device: torch.device) -> None:
    found = misses(EXPERTS // 2, device, one_miss=False)
    assert len(set(found)) > 2 and abs(sum(found) / ROWS - K / 2) < 0.5


def measure(
    hybrid: Hybrid, sizes: list[int], seconds: Mapping[LinkPart, float], pays: list[LinkPart]
) -> tuple[dict[int, LinkedTimes], list[tuple[int, int, float]]]:
    """Times, and of each run without a part: tokens and number of its exchanges, and misses of a
    token.

    Args:
        seconds: of a run.
    """
    experts, team, hits = hybrid.experts, hybrid.team, hybrid.bank.hits
    on_host = hybrid.bank.table == ON_HOST
    runs: list[tuple[int, int, float]] = []

    def timer(run: Callable[[], None], wake: Callable[[], None]) -> float:
        part = experts.link_part(1)
        if part == NO_PART:  # kernels of the others are slow in the interpreter
            del team.requests[:]
            hits.zero_()
            run()
            if hits.is_cuda:
                torch.cuda.synchronize()
            tokens = team.requests[0][1]
            assert {number for _, number in team.requests} == {tokens}
            pairs = int(hits.sum())
            k = hybrid.exchange.mailbox.ids.shape[1]
            runs.append((tokens, pairs // (tokens * k), int(hits[on_host].sum()) * k / pairs))
        return seconds[part]

    def paying(times: Mapping[LinkPart, float], none: LinkPart) -> list[LinkPart]:
        assert none == NO_PART and list(times) == list(seconds)
        return pays

    found = experts.measure_linked(sizes, list(seconds), paying, timer=timer)
    assert experts.link_part(1) == NO_PART and not hits.any()
    return found, runs


def test_parts_that_pay_are_timed_with_one_miss_a_token_too(
    tmp_path: Path, device: torch.device
) -> None:
    torch.manual_seed(0)
    seconds = {NO_PART: 8.0, ROWS_PART: 7.0, WHOLE: 6.0}
    with open_hybrid(
        checkpoint_of(tmp_path, "qwen3_moe"), device, residency=0.5, most_rows=ASKS
    ) as hybrid:
        found, runs = measure(hybrid, [3, 5], seconds, [WHOLE])
    for size, exchanges, (random, one_miss) in ((3, 11, runs[:2]), (5, 8, runs[2:])):
        times = found[size]
        assert times.random == {part: each / 8 for part, each in seconds.items()}
        assert times.one_miss == {part: seconds[part] / exchanges for part in (NO_PART, WHOLE)}
        assert random[:2] == (size, 8) and random[2] > 1.1
        assert one_miss == (size, exchanges, 1.0)


@pytest.mark.parametrize("residency", [0.0, 0.5])
def test_without_a_bank_or_a_part_that_pays_only_random_routes_are_timed(
    tmp_path: Path, device: torch.device, residency: float
) -> None:
    pays = [] if residency else [WHOLE]
    checkpoint = checkpoint_of(tmp_path, "qwen3_moe")
    with open_hybrid(checkpoint, device, residency=residency, most_rows=ASKS) as hybrid:
        found, runs = measure(hybrid, [2], {NO_PART: 2.0, WHOLE: 1.0}, pays)
    assert found == {2: LinkedTimes({NO_PART: 0.25, WHOLE: 0.125}, {})} and len(runs) == 1
