"""Chains of a draft model beside its target: over stand-ins for both models that check every row,
and over real ones, whose tokens have to be those without drafts."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from hetero_llm import SamplingParams
from hetero_llm.config.args import resolve_engine_args
from hetero_llm.config.engine_config import EngineConfig, SchedulerConfig
from hetero_llm.core.errors import ConfigError
from hetero_llm.core.step import LAST_SAMPLED, ModelRunnerOutput, SchedulerOutput
from hetero_llm.cpu import native
from hetero_llm.engine.builders.build_device_draft import count_blocks, draft_limits
from hetero_llm.engine.factory import build_engine
from hetero_llm.models.read_config import load_model_config
from hetero_llm.runner.kv_cache import KVCacheShape
from hetero_llm.scheduler.scheduler import Scheduler
from hetero_llm.spec_decode.draft_model.on_device import ChainDrafter
from tests.helpers.draft_traffic import (
    EVERYTHING,
    FAST,
    MAX_LEN,
    build,
    differing,
    make_model,
    make_traffic,
    serve,
)
from tests.helpers.harness import (
    VOCAB,
    FakeRunner,
    expected_output,
    make_request,
    make_scheduler,
    run_to_end,
)
from tests.models.tiny import make_tiny_checkpoint, rewrite_config

SIZE = 8
GREEDY = SamplingParams(temperature=0, max_tokens=30, ignore_eos=True)


class DraftRunner(FakeRunner):
    """The target's stand-in, wrong about every `wrong`-th token; rows may be written over.

    Attributes:
        steps: rows and draws of each step.
        most_under_way: steps launched and not finished, at most.
    """

    def __init__(self, num_blocks: int, slots: int, columns: int, wrong: int = 0) -> None:
        super().__init__(num_blocks, SIZE, slots, columns)
        self.wrong = wrong
        self.steps: list[tuple[list[int], list[int]]] = []
        self.most_under_way = 0

    def launch(self, step: SchedulerOutput) -> int:
        assert all(not state.params.logits_processors for state in step.admitted)
        self.steps.append((step.num_scheduled_tokens.tolist(), step.num_samples.tolist()))
        number = super().launch(step)
        self.most_under_way = max(self.most_under_way, len(self._queue))
        return number

    def _feed(self, slot: int, position: int, token: int) -> None:
        fed = self._fed[slot]
        known = self._sampled[slot] if token == LAST_SAMPLED else token
        if position < len(fed) and known != fed[position]:
            del fed[position:]
        super()._feed(slot, position, token)

    def _sample(self, slot: int, context: list[int], sample: int | None = None) -> int:
        token = super()._sample(slot, context, sample)
        return (token + 1) % VOCAB if self.wrong and sum(context) % self.wrong == 0 else token


class Pair:
    """A scheduler with a chain drafter, and stand-ins for both models."""

    def __init__(
        self,
        *,
        wrong: int = 0,
        draft_blocks: int = 128,
        draft_rows: int = 32,
        longest: int = 128,
        num_tokens: int = 4,
        most_sequences: int | None = None,
        **scheduler: Any,
    ) -> None:
        slots = scheduler.get("max_num_seqs", 8)
        limits = SchedulerConfig(slots, draft_rows, longest, True, SIZE)
        self.draft_runner = DraftRunner(draft_blocks, slots, 16, wrong)
        self.drafter = ChainDrafter(
            self.draft_runner, limits, draft_blocks,
            num_tokens=num_tokens, most_sequences=most_sequences,
        )  # fmt: skip
        self.scheduler, self.blocks, self.runner = make_scheduler(drafter=self.drafter, **scheduler)

    def run(self, work: dict[str, tuple[list[int], SamplingParams]]) -> dict[str, list[list[int]]]:
        """The tokens of every sample of each request."""
        requests = {n: make_request(n, prompt, params) for n, (prompt, params) in work.items()}
        for request in requests.values():
            self.scheduler.add_request(request)
        run_prepared(self.scheduler, self.runner, self.drafter)
        return {n: [s.output_ids for s in r.sequences] for n, r in requests.items()}

    @property
    def accepted(self) -> int:
        return self.scheduler.stats.num_accepted_tokens

    def check_idle(self) -> None:
        """Every block of the draft model is free again."""
        self.drafter.check_integrity()
        assert self.drafter.num_sequences == 0


def run_prepared(scheduler: Scheduler, runner: FakeRunner, drafter: ChainDrafter) -> None:
    """Runs the engine's loop: drafters see new prompts and do their deferred work while the device
    works."""
    for _ in range(5000):
        step = scheduler.schedule()
        if step is None:
            assert scheduler.num_unfinished == 0, "requests are left but nothing can run"
            return
        number = runner.launch(step)
        scheduler.step_launched()
        scheduler.update(step, runner.finish(number))
        scheduler.run_deferred()
        scheduler.check_integrity()
        drafter.check_integrity()
    raise AssertionError("no end in sight")


def prompts_of(count: int, longest: int = 40) -> list[list[int]]:
    rng = np.random.default_rng(count)
    stem = rng.integers(1, VOCAB, longest).tolist()
    lengths = rng.integers(1, longest, count).tolist()
    own = rng.integers(1, VOCAB, (count, 3)).tolist()
    return [stem[:n] + tail for n, tail in zip(lengths, own)]


@pytest.mark.parametrize("wrong", [0, 2, 5])
@pytest.mark.parametrize(
    "limits",
    [
        {},
        {"max_num_seqs": 1},
        {"num_blocks": 18, "max_num_seqs": 4},
        {"draft_blocks": 20},
        {"draft_rows": 16},
        {"prefix_caching": False, "num_tokens": 9},
        {"num_tokens": 1},
    ],
)
def test_tokens_are_those_without_drafts(limits: dict[str, Any], wrong: int) -> None:
    pair = Pair(wrong=wrong, **limits)
    work = {
        str(i): (prompt, replace(GREEDY, n=1 + (i % 3 == 1 and "max_num_seqs" not in limits)))
        for i, prompt in enumerate(prompts_of(12))
    }
    for _ in range(2):
        for name, samples in pair.run(work).items():
            prompt, params = work[name]
            for index, tokens in enumerate(samples):
                assert tokens == expected_output(prompt, params, index)
        pair.check_idle()
    assert pair.accepted > (200 if wrong == 0 else 50)
    assert pair.draft_runner.most_under_way <= 3
    assert (pair.scheduler.stats.num_preemptions > 0) == ("num_blocks" in limits)


def test_a_chain_is_a_step_and_single_rows() -> None:
    """The prompt is run while the target runs it; after that each proposal has only what is new:
    two tokens after a chain accepted as a whole, else one."""
    pair = Pair(num_tokens=3, wrong=3)
    prompt = prompts_of(1)[0] * 4
    pair.run({"a": (prompt, GREEDY)})
    first, *rest = pair.draft_runner.steps
    assert first == ([min(len(prompt), 32)], [0])
    assert all(len(counts) == 1 for counts, _ in rest)
    chains = [counts[0] for counts, samples in rest if samples == [1]]
    assert set(chains) == {1, 2}
    stats = pair.scheduler.stats
    assert 0 < stats.num_accepted_tokens < stats.num_draft_tokens
    # A chain of three takes three draws; only limits at the end make it shorter.
    assert len(chains) - 3 <= stats.num_draft_tokens <= len(chains)


def test_prompts_do_not_hold_up_others_drafts() -> None:
    """While a long prompt takes several steps of the draft model, the others are drafted for."""
    pair = Pair(draft_rows=16, max_num_batched_tokens=128, max_num_seqs=2)
    long = prompts_of(1, 90)[0] * 30
    work = {"short": ([1, 2], GREEDY), "long": (long[:90], GREEDY)}
    outputs = pair.run(work)
    assert outputs == {n: [expected_output(p, q)] for n, (p, q) in work.items()}
    mixed = [samples for counts, samples in pair.draft_runner.steps if len(counts) == 2]
    assert sorted([0, 1]) in [sorted(samples) for samples in mixed]


def test_prompts_are_shared() -> None:
    """Samples and later requests find the blocks of a prompt."""
    pair = Pair()
    prompt = prompts_of(1)[0] * 10
    prompt = prompt[:33]
    params = replace(GREEDY, n=4, max_tokens=6)
    pair.run({"a": (prompt, params)})
    rows = [counts for counts, samples in pair.draft_runner.steps if samples[0] == 0]
    assert sum(map(sum, rows)) == 33
    proposal = next(c for c, samples in pair.draft_runner.steps if samples[0] == 1)
    assert sorted(proposal) == [1, 2, 2, 2]  # the draft model has the forked one's 32 tokens
    before = len(pair.draft_runner.steps)
    pair.run({"b": (prompt, params)})
    assert pair.draft_runner.steps[before][0] == [1]
    pair.drafter.reset_prefix_cache()
    before = len(pair.draft_runner.steps)
    pair.run({"c": (prompt, params)})
    assert pair.draft_runner.steps[before][0] == [32]


def test_a_text_beyond_the_context_is_not_drafted_for() -> None:
    pair = Pair(longest=40)
    work = {"short": ([1, 2], GREEDY), "long": ([3] * 50, GREEDY), "grows": ([4] * 30, GREEDY)}
    assert pair.run(work) == {n: [expected_output(p, q)] for n, (p, q) in work.items()}
    pair.check_idle()
    alone = Pair(longest=40)
    alone.run({"long": work["long"]})
    assert alone.scheduler.stats.num_drafts == 0 and alone.draft_runner.steps == []
    assert pair.scheduler.stats.num_drafts > 0


def test_no_drafts_in_large_steps() -> None:
    pair = Pair(most_sequences=2)
    work = {str(i): ([i + 1, 5], GREEDY) for i in range(3)}
    pair.run(work)
    assert pair.scheduler.stats.num_drafts == 0 and pair.draft_runner.steps == []
    pair.drafter.run_deferred()
    for _ in range(8):
        pair.drafter.run_deferred()
    pair.run({n: work[n] for n in ("0", "1")})
    assert pair.accepted > 30


def test_no_blocks_no_draft() -> None:
    """Whoever finds no blocks goes without; blocks of a preempted sequence are taken back."""
    pair = Pair(draft_blocks=7, max_num_seqs=4)
    work = {str(i): ([i + 1] * 20, GREEDY) for i in range(4)}
    assert pair.run(work) == {n: [expected_output(p, q)] for n, (p, q) in work.items()}
    assert pair.accepted > 10
    pair.check_idle()


def test_run_without_being_sent_of_prompts() -> None:
    pair = Pair()
    request = make_request("a", prompts_of(1)[0], GREEDY)
    pair.scheduler.add_request(request)
    run_to_end(pair.scheduler, pair.runner)
    assert request.sequences[0].output_ids == expected_output(request.prompt_token_ids, GREEDY)
    assert pair.accepted > 20


# -- real models ----------------------------------------------------------------------------


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model(tmp_path_factory.mktemp("pair") / "target")


@pytest.fixture(scope="module")
def draft(target: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The target with noise on its weights: it often agrees."""
    folder = tmp_path_factory.mktemp("pair") / "draft"
    folder.mkdir()
    for file in target.iterdir():
        (folder / file.name).write_bytes(file.read_bytes())
    (path,) = folder.glob("*.safetensors")
    generator = torch.Generator().manual_seed(0)
    weights = {
        name: value + 0.15 * value.std() * torch.randn(value.shape, generator=generator)
        if value.dim() > 1
        else value
        for name, value in load_file(path).items()
    }
    save_file(weights, path, {"format": "pt"})
    return folder


ENGINES: dict[str, dict[str, Any]] = {
    "invariant": {"batch_invariant": True},
    "native": {},
}


@pytest.mark.usefixtures("free_drafts")
@pytest.mark.parametrize(("batch", "least"), [(1, 0.2), (7, 0.08)])
@pytest.mark.parametrize("name", ENGINES)
def test_any_traffic_is_served_as_without_drafts(
    target: Path, draft: Path, batch: int, least: float, name: str
) -> None:
    if name == "native" and native.load() is None:
        pytest.skip("needs the compiled library")
    torch.set_num_threads(1)
    kinds = EVERYTHING if batch > 1 else FAST
    plain = serve(build(target, batch, None, **ENGINES[name]), make_traffic(0, batch, kinds),
                  aborting=False)  # fmt: skip
    engine = build(
        target, batch, None, **ENGINES[name],
        speculative_model=str(draft), num_speculative_tokens=4,
    )  # fmt: skip
    assert differing(plain, serve(engine, make_traffic(0, batch, kinds))) == []
    metrics = engine.metrics()
    assert metrics["spec_decode_num_accepted_tokens"] > least * metrics["generation_tokens"]
    assert batch == 1 or metrics["num_preemptions"] > 0
    drafter: Any = engine.scheduler.drafter
    drafter.check_integrity()
    assert drafter.num_sequences == 0


@pytest.mark.usefixtures("free_drafts")
def test_a_draft_model_like_the_target_draws_alike(target: Path) -> None:
    """At any temperature and for every sample: what both draw depends on logits alone."""
    kinds = {n: FAST[n] for n in ("greedy", "mild", "hot", "samples", "to the end")}
    kinds["top-k"] = replace(EVERYTHING["top-k"], top_p=0.9)
    kinds = {name: replace(params, ignore_eos=True) for name, params in kinds.items()}
    engine = build(
        target, 7, None, speculative_model=str(target), num_speculative_tokens=3,
        batch_invariant=True,
    )  # fmt: skip
    serve(engine, make_traffic(1, 7, kinds), aborting=False)
    metrics = engine.metrics()
    drafted = metrics["spec_decode_num_draft_tokens"]
    assert drafted > 100 and metrics["spec_decode_num_accepted_tokens"] == drafted


def start(target: Path, draft: Path | str, **more: Any) -> Any:
    given = {
        "model": str(target), "device": "cpu", "dtype": "float32", "block_size": 8,
        "max_model_len": MAX_LEN, "max_num_seqs": 4, "cpu_threads": 1, "disable_log_stats": True,
        "speculative_model": str(draft), "num_speculative_tokens": 3,
    }  # fmt: skip
    config = EngineConfig.from_args(resolve_engine_args({**given, **more}))
    return build_engine(config, show_progress=False).engine.scheduler.drafter


class TestStart:
    def test_sizes(self, target: Path, draft: Path) -> None:
        drafter = start(target, draft, speculative_max_model_len=50)
        assert drafter.limits == SchedulerConfig(4, 1024, 50, True, 8)
        assert drafter.num_blocks == 4 * 7
        small = start(target, draft, max_num_batched_tokens=4, num_gpu_blocks_override=20)
        assert small.limits == SchedulerConfig(4, 8, MAX_LEN, True, 8)
        assert small.num_blocks == 20

    def test_another_vocabulary(self, target: Path, tmp_path: Path) -> None:
        other = make_tiny_checkpoint(tmp_path / "other", "llama")
        with pytest.raises(
            ConfigError, match="^speculative_model=.*its vocabulary has 96 tokens, "
        ):
            start(target, other)
        assert start(target, other, draft_optional=True) is None

    def test_no_such_model(self, target: Path) -> None:
        assert start(target, "no/such/folder/here", draft_optional=True) is None

    def test_no_memory(self, target: Path, draft: Path) -> None:
        expected = r"^gpu_memory_utilization=1e-09: gives 0 KV blocks of the free host memory"
        with pytest.raises(ConfigError, match=expected):
            start(target, draft, gpu_memory_utilization=1e-9, speculative_max_model_len=50)

    def test_the_drafts_context_ends_first(self, target: Path, draft: Path, tmp_path: Path) -> None:
        short = tmp_path / "short"
        short.mkdir()
        for file in draft.iterdir():
            (short / file.name).write_bytes(file.read_bytes())
        rewrite_config(short, max_position_embeddings=64)
        assert start(target, short).limits.max_model_len == 64

    def test_both_caches_share_the_room(self, target: Path) -> None:
        given = {"model": str(target), "max_num_seqs": 4, "block_size": 8}
        config = EngineConfig.from_args(resolve_engine_args(given))
        model = load_model_config(target)
        small = KVCacheShape(1, 2, 8, 8, torch.float32)
        large = replace(small, num_layers=3)
        assert config.speculation is None
        speculation = EngineConfig.from_args(
            resolve_engine_args({**given, "speculative_model": "x", "num_speculative_tokens": 2})
        ).speculation
        assert speculation is not None and speculation.draft is not None
        limits = draft_limits(speculation.draft, model, SchedulerConfig(4, 64, MAX_LEN, True, 8))
        room = 40 * (small.block_bytes + large.block_bytes) + 5
        assert count_blocks(config, "x", limits, room, small, large) == 40
        assert count_blocks(config, "x", limits, 100 * room, small, large) == 4 * 14
        with pytest.raises(ConfigError, match="leaves 0 KV blocks"):
            count_blocks(config, "x", limits, -5, small, large)


def test_only_finished_results_are_kept() -> None:
    """`finish` is called in the order of the launches, once for every step of a chain."""

    class Counting(DraftRunner):
        finished = 0

        def finish(self, pending: int) -> ModelRunnerOutput:
            assert pending == self.finished
            self.finished += 1
            return super().finish(pending)

    pair = Pair(num_tokens=12)
    runner = Counting(128, 8, 16)
    pair.drafter.runner = runner
    pair.run({"a": ([1, 2, 3], GREEDY)})
    assert pair.accepted > 20 and runner.finished == len(runner.steps)
