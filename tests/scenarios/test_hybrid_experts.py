"""Mixtures with experts on the host through the runner of the GPU, in Triton's interpreter: tokens
do not depend on where experts are, nor on experts that change places."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from hetero_llm.bridge.expert_mailbox import NO_PART, LinkPart
from hetero_llm.core.sampling_params import SamplingParams
from hetero_llm.core.step import AdmittedSequence, SchedulerOutput
from hetero_llm.engine.builders.build_experts import expert_modules
from hetero_llm.expert_offload.step_costs import LaneCosts
from hetero_llm.gpu.expert_bank import ExpertBank
from hetero_llm.gpu.hybrid_experts import HybridExperts
from hetero_llm.gpu.model_runner import GpuModelRunner
from hetero_llm.models.config import ModelConfig
from hetero_llm.models.experts import Experts
from hetero_llm.models.layers import CausalLM
from hetero_llm.models.loader import load_model
from hetero_llm.models.read_config import load_model_config
from hetero_llm.runner.kv_cache import KVCacheShape, PagedKVCache
from hetero_llm.runner.model_runner import TorchModelRunner
from tests.gpu.test_model_runner import step_of
from tests.helpers.hybrid import DelayedCopies, EveryStep, Hybrid, open_hybrid
from tests.models.tiny import make_tiny_checkpoint

BLOCKS, SLOTS, MAX_LEN, PROMPT = 8, 2, 64, 9
ASKS, STREAMS = 32, 8
"""Rows up to which a step asks: more than those of the prompts' step, and fewer."""


@pytest.fixture(scope="module")
def device() -> torch.device:
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


def checkpoint_of(folder: Path, family: str) -> Path:
    variant = "heads_of_16" if family == "gpt_oss" else "full"
    return make_tiny_checkpoint(folder, family, variant, layers=3 if family == "glm4_moe" else 2)


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return checkpoint_of(tmp_path_factory.mktemp("qwen3"), "qwen3_moe")


def steps(count: int) -> list[SchedulerOutput]:
    """A prompt of 9 tokens beside one of 2, then tokens one by one, greedily."""
    rng = np.random.default_rng(0)
    prompts = [rng.integers(3, 90, n).tolist() for n in (PROMPT, 2)]
    states = tuple(
        AdmittedSequence(i, tuple(p), len(p), SamplingParams(temperature=0.0), 0, 0, None)
        for i, p in enumerate(prompts)
    )
    writes = [(slot, column, slot * 4 + column) for slot in range(2) for column in range(4)]
    first = step_of([(i, 0, p, 1) for i, p in enumerate(prompts)], states, writes)
    return [
        first,
        *(step_of([(0, PROMPT + i, [-1], 1), (1, 2 + i, [-1], 1)]) for i in range(count)),
    ]


def cache_of(config: Any, device: torch.device) -> PagedKVCache:
    shape = KVCacheShape(config.num_layers, config.num_kv_heads, config.head_dim, 16, torch.float32)
    return PagedKVCache(shape, BLOCKS, device)


def plain_tokens(checkpoint: Path, device: torch.device, count: int) -> list[list[int]]:
    """Of the torch runner, with all experts on the device."""
    config = load_model_config(checkpoint)
    model = load_model(checkpoint, config, dtype=torch.float32, device=device, show_progress=False)
    runner = TorchModelRunner(
        model, config, cache_of(config, device), max_num_seqs=SLOTS, max_model_len=MAX_LEN,
        device=device,
    )  # fmt: skip
    return [runner.finish(runner.launch(step)).token_ids for step in steps(count)]


def runner_with(
    model: CausalLM, config: ModelConfig, experts: HybridExperts, device: torch.device
) -> GpuModelRunner:
    return GpuModelRunner(
        model, config, cache_of(config, device), max_num_seqs=SLOTS, max_model_len=MAX_LEN,
        max_num_batched_tokens=32, graphs=False, experts=experts,
    )  # fmt: skip


def runner_of(hybrid: Hybrid, device: torch.device) -> GpuModelRunner:
    return runner_with(hybrid.model, hybrid.config, hybrid.experts, device)


def run_steps(
    model: CausalLM, config: ModelConfig, experts: HybridExperts, device: torch.device, count: int
) -> list[list[int]]:
    """Tokens of `steps(count)`, one step after the other."""
    runner = runner_with(model, config, experts, device)
    return [runner.finish(runner.launch(step)).token_ids for step in steps(count)]


def poison(bank: ExpertBank, slot: int) -> None:
    for part in (bank.gate_up, bank.down):
        assert isinstance(part.weights, torch.Tensor)
        part.weights[slot].fill_(float("nan"))


@pytest.mark.parametrize("residency", [0.0, 0.3, 0.7, 1.0])
@pytest.mark.parametrize("most_rows", [ASKS, STREAMS])
@pytest.mark.parametrize("spares", [None, 2])
def test_outputs_do_not_depend_on_where_experts_are(
    checkpoint: Path, device: torch.device, residency: float, most_rows: int, spares: int | None
) -> None:
    """Both mixtures of the model, for a prompt's tokens and for two, one of which is padding."""
    config = load_model_config(checkpoint)
    model = load_model(checkpoint, config, dtype=torch.float32, device=device, show_progress=False)
    with open_hybrid(
        checkpoint, device, residency=residency, most_rows=most_rows, spares=spares
    ) as hybrid:
        modules = expert_modules(hybrid.model)
        k = hybrid.config.experts_per_token  # type: ignore[attr-defined]
        for rows in (PROMPT, 2):
            kv_slots = torch.arange(rows, dtype=torch.int32, device=device)
            kv_slots[-1] = -1
            hybrid.experts.begin(kv_slots)
            for plain, ours in zip(expert_modules(model), modules, strict=True):
                x, ids, weights = routes_of(rows, plain, k, device)
                expected = plain(x, ids, weights)
                found = ours(x, ids, weights)
                torch.testing.assert_close(found[:-1], expected[:-1], atol=1e-5, rtol=0)
                assert not found[-1].any()
        asked = [tokens for _, tokens in hybrid.team.requests]
        assert bool(asked) == (residency < 1.0)
        assert (PROMPT in asked) == (residency < 1.0 and most_rows == ASKS)


def routes_of(
    rows: int, module: Experts, k: int, device: torch.device
) -> tuple[Tensor, Tensor, Tensor]:
    """x, ids and weights of tokens that choose experts unevenly."""
    experts, hidden, _ = module.down.shape
    generator = torch.Generator().manual_seed(rows)
    x = torch.randn(rows, hidden, generator=generator)
    likely = torch.linspace(0, 3, experts) + torch.rand(rows, experts, generator=generator)
    weights, ids = likely.topk(k, dim=1)
    return x.to(device), ids.to(device, torch.int32), weights.softmax(-1).to(device)


def test_experts_of_few_tokens_stay_on_the_cpu_while_the_others_stream(
    checkpoint: Path, device: torch.device
) -> None:
    """The threads take those of the fewest tokens, as many as the mailbox has rows for. The second
    step's first copies follow the first one's counts."""
    with open_hybrid(checkpoint, device, residency=0.2, most_rows=STREAMS) as hybrid:
        config = load_model_config(checkpoint)
        model = load_model(
            checkpoint, config, dtype=torch.float32, device=device, show_progress=False
        )
        hybrid.experts.share_long_steps(LaneCosts(exchange=0.0, expert=0.4, row=0.01, link=1.0))
        kv_slots = torch.arange(PROMPT, dtype=torch.int32, device=device)
        kv_slots[3] = -1
        real = kv_slots >= 0
        k = config.experts_per_token  # type: ignore[attr-defined]
        for again in (False, True):
            hybrid.experts.begin(kv_slots)
            del hybrid.team.requests[:]
            for layer, (plain, ours) in enumerate(
                zip(expert_modules(model), expert_modules(hybrid.model), strict=True)
            ):
                x, ids, weights = routes_of(PROMPT, plain, k, device)
                expected = plain(x, ids, weights)
                found = ours(x, ids, weights)
                torch.testing.assert_close(found[real], expected[real], atol=1e-5, rtol=0)
                counts = torch.bincount(ids[real].flatten().long(), minlength=len(plain.down)).cpu()
                on_host = hybrid.experts.moves.placement.table[layer] < 0
                if min(n for n in counts[on_host].tolist() if n) > STREAMS or (layer and not again):
                    continue  # the second layer's first guess is that all have equally many
                asked, tokens = hybrid.team.requests[-1]
                assert asked == layer and 1 <= tokens <= STREAMS


@pytest.mark.parametrize(
    "family, residency, most_rows",
    [("qwen3_moe", 0.3, ASKS), ("gpt_oss", 0.3, ASKS), ("glm4_moe", 0.3, STREAMS)],
)
def test_tokens_do_not_depend_on_where_experts_are(
    tmp_path: Path, device: torch.device, family: str, residency: float, most_rows: int
) -> None:
    checkpoint = checkpoint_of(tmp_path, family)
    wanted = plain_tokens(checkpoint, device, 1)
    with open_hybrid(checkpoint, device, residency=residency, most_rows=most_rows) as hybrid:
        if most_rows == STREAMS:
            costs = LaneCosts(exchange=0.0, expert=1.0, row=0.1, link=1.0)
            hybrid.experts.share_long_steps(costs)
        runner = runner_of(hybrid, device)
        found = [runner.finish(runner.launch(step)).token_ids for step in steps(1)]
        assert found == wanted
        rows = [tokens for _, tokens in hybrid.team.requests]
        assert (PROMPT + 2 in rows) == (most_rows == ASKS)  # the step of both prompts
        assert len(rows) > 2


def cut_checkpoint(folder: Path, family: str = "qwen3_moe") -> Path:
    """With experts of 192 inner rows, of which the GPU may compute the last 64."""
    variant, name = ("heads_of_16", "intermediate_size") if family == "gpt_oss" else (
        "full", "moe_intermediate_size",
    )  # fmt: skip
    return make_tiny_checkpoint(folder, family, variant, layers=2, changes={name: INNER})


INNER, LINKED = 192, LinkPart(rows=64)


@pytest.mark.parametrize("part", [LINKED, LinkPart(whole=128)], ids=["rows", "whole"])
@pytest.mark.parametrize(
    "family, spares", [("qwen3_moe", None), ("qwen3_moe", 2), ("gpt_oss", None)]
)
def test_the_gpu_computes_a_part_of_the_missed_experts(
    tmp_path: Path, device: torch.device, family: str, spares: int | None, part: LinkPart
) -> None:
    """Of steps with up to three tokens; larger ones leave all to the threads, as do long ones."""
    checkpoint = cut_checkpoint(tmp_path, family)
    wanted = plain_tokens(checkpoint, device, 2)
    with open_hybrid(checkpoint, device, residency=0.3, most_rows=ASKS, spares=spares) as hybrid:
        hybrid.experts.use_link({1: NO_PART, 3: part})
        runner = runner_of(hybrid, device)
        found = [runner.finish(runner.launch(step)).token_ids for step in steps(2)]
        assert found == wanted
        shares = dict(zip([n for _, n in hybrid.team.requests], hybrid.team.parts, strict=True))
        assert shares == {PROMPT + 2: NO_PART, 2: part}


@pytest.mark.parametrize("part", [LINKED, LinkPart(whole=128)], ids=["rows", "whole"])
def test_the_part_of_the_gpu_follows_experts_that_change_sides(
    tmp_path: Path, device: torch.device, part: LinkPart
) -> None:
    """See `check_sides`."""
    check_sides(cut_checkpoint(tmp_path), device, {1: part})


def test_tokens_while_experts_change_places_in_every_step(
    checkpoint: Path, device: torch.device
) -> None:
    """Slots hold no numbers from the moment in which a copy may begin until it has ended, two steps
    are under way at a time, and the prompts stream."""
    count = 7
    wanted = plain_tokens(checkpoint, device, count)
    made: list[DelayedCopies] = []

    def delayed(bank: ExpertBank) -> DelayedCopies:
        made.append(DelayedCopies(lambda slot: poison(bank, slot)))
        return made[0]

    with open_hybrid(
        checkpoint, device, residency=0.5, most_rows=STREAMS, placement=EveryStep, copies=delayed
    ) as hybrid:
        runner, found = runner_of(hybrid, device), []
        work = steps(count)
        under_way = [runner.launch(work[0])]
        for step in work[1:]:
            under_way.append(runner.launch(step))
            found.append(runner.finish(under_way.pop(0)).token_ids)
            made[0].advance()
            table = hybrid.experts.moves.placement.table
            assert (hybrid.bank.table.cpu().numpy() == table).all()
        found.append(runner.finish(under_way.pop(0)).token_ids)
        assert found == wanted
        assert hybrid.experts.moves.num_promoted >= 2 and made[0].ended >= 2


def test_the_counters_reach_the_placement(checkpoint: Path, device: torch.device) -> None:
    """Of the prompts' step alone, and of the steps after it; the prompts' last layer goes on with
    the two sampled tokens."""
    made: list[EveryStep] = []

    def watched(table: np.ndarray) -> EveryStep:
        made.append(EveryStep(table))
        return made[0]

    with open_hybrid(
        checkpoint, device, residency=0.0, most_rows=STREAMS, placement=watched
    ) as hybrid:
        runner = runner_of(hybrid, device)
        for step in steps(3):
            runner.finish(runner.launch(step))
        k = hybrid.config.experts_per_token  # type: ignore[attr-defined]
        assert made[0].prompts.sum(1).tolist() == [(PROMPT + 2) * k, 2 * k]
        assert made[0].observed.sum(1).tolist() == [2 * k, 2 * k]  # the last two are not read yet


def test_a_team_that_is_gone_ends_the_step_with_an_error(
    checkpoint: Path, device: torch.device
) -> None:
    with open_hybrid(checkpoint, device, residency=0.0, most_rows=ASKS, most_looks=20) as hybrid:
        hybrid.team.die()
        runner = runner_of(hybrid, device)
        pending = runner.launch(steps(0)[0])
        with pytest.raises(RuntimeError, match="CPU threads that compute experts"):
            runner.finish(pending)


def test_outputs_while_experts_change_sides_in_every_step(
    checkpoint: Path, device: torch.device
) -> None:
    check_sides(checkpoint, device, {})


def check_sides(checkpoint: Path, device: torch.device, parts: dict[int, LinkPart]) -> None:
    """Host memory holds what the bank does not. Slots and places hold no numbers while a copy
    writes them, and two steps are under way at a time."""
    config = load_model_config(checkpoint)
    model = load_model(checkpoint, config, dtype=torch.float32, device=device, show_progress=False)
    made: list[DelayedCopies] = []

    def delayed(bank: ExpertBank) -> DelayedCopies:
        def poison_place(place: int) -> None:
            for part in (bank.host.layers[0].gate_up, bank.host.layers[0].down):
                part.data[place].fill_(float("nan"))

        made.append(
            DelayedCopies(lambda slot: poison(bank, slot), steps=1, poison_place=poison_place)
        )
        return made[0]

    with open_hybrid(
        checkpoint, device, residency=0.5, most_rows=STREAMS, copies=delayed, spares=2,
        placement=lambda table: EveryStep(table, owners_stay=True),
    ) as hybrid:  # fmt: skip
        experts, k = hybrid.experts, hybrid.config.experts_per_token  # type: ignore[attr-defined]
        experts.begin(torch.arange(1, dtype=torch.int32, device=device))
        experts.use_link(parts)
        for step in range(24):
            experts.before_launch(np.ones(1, np.int32), link_is_busy=False)
            for plain, ours in zip(
                expert_modules(model), expert_modules(hybrid.model), strict=True
            ):
                x, ids, weights = routes_of(1, plain, k, device)
                ids = (ids + step) % len(plain.down)
                found = ours(x, ids, weights)
                torch.testing.assert_close(found, plain(x, ids, weights), atol=1e-5, rtol=0)
            if step:
                experts.finished()  # the step before
            made[0].advance()
            assert hybrid.host.places is not None
            hybrid.host.places.check_integrity()
        assert experts.moves.num_promoted >= 5
        assert set(hybrid.team.parts) == set(parts.values() or (NO_PART,))
