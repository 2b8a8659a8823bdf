"""The draft worker in the engine: the tokens are those without drafts, whatever becomes of it; and
which draft models fit a target.

The worker runs in this process here (local_worker.py), crashes and stands still at random; real
processes are killed in tests/faults/test_draft_faults.py.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch

from hetero_llm.config.args import resolve_engine_args
from hetero_llm.config.draft_model_config import DraftModelConfig
from hetero_llm.config.engine_config import EngineConfig
from hetero_llm.config.lookahead_config import LookaheadConfig
from hetero_llm.core.errors import ConfigError, ModelLoadError
from hetero_llm.core.step_times import StepTimes
from hetero_llm.cpu import native
from hetero_llm.cpu.draft_worker.draft_model import DraftModel
from hetero_llm.engine.builders.build_draft_worker import prepare_draft_model, start_draft_model
from hetero_llm.engine.core_plan import CorePlan
from hetero_llm.engine.text.tokenizer import load_tokenizer
from hetero_llm.models.read_config import load_model_config
from hetero_llm.spec_decode.draft_model import worker_client
from hetero_llm.spec_decode.draft_model.proposer import DraftModelProposer
from hetero_llm.spec_decode.draft_model.worker_settings import WorkerSettings
from hetero_llm.spec_decode.hybrid_drafter import HybridDrafter
from hetero_llm.spec_decode.proposal_account import ProposalAccount
from tests.helpers.draft_traffic import (
    EVERYTHING,
    FAST,
    MAX_LEN,
    VOCAB,
    Bench,
    make_draft,
    make_model,
)
from tests.models.tiny import make_tiny_checkpoint, rewrite_config
from tests.spec_decode.draft_model.local_worker import LocalWorker, Setting, as_any, load_model

pytestmark = pytest.mark.usefixtures("forked_engines")

CONFIG = DraftModelConfig(
    model="draft", revision=None, num_tokens=5, max_model_len=None, threads=1,
    weight_dtype="float32", overlap="auto", timeout=None, optional=False,
)  # fmt: skip
INVARIANT: dict[str, Any] = {"batch_invariant": True}
BENCHES: dict[str, tuple[int, dict[str, Any], dict[str, Any]]] = {
    "native fast 1": (1, FAST, {}),
    "native fast 7": (7, FAST, {}),
    "native 7": (7, EVERYTHING, {}),
    "invariant 1": (1, EVERYTHING, INVARIANT),
    "invariant 7": (7, EVERYTHING, INVARIANT),
}
SLOTS = 6
"""Of the worker: fewer than sequences, so that some have no drafts of it."""


# -- the same tokens ----------------------------------------------------------------------------


@pytest.fixture(scope="module", autouse=True)
def quiet() -> Iterator[None]:
    """One thread for torch, as the native executor has its own, and drafts at no price: what is
    drafted would depend on how loaded the machine is."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(StepTimes, "observe", lambda *_: None)
        patch.setattr(ProposalAccount, "set_step_times", lambda *_: None)
        yield
    torch.set_num_threads(threads)


@pytest.fixture(autouse=True)
def one_thread(two_threads: None, quiet: None) -> None:
    torch.set_num_threads(1)


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model(tmp_path_factory.mktemp("target") / "model")


@pytest.fixture(scope="module")
def draft_folder(target: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_draft(target, tmp_path_factory.mktemp("draft") / "model")


@pytest.fixture(scope="module")
def draft_model(draft_folder: Path) -> DraftModel:
    return load_model(draft_folder, Setting(slots=SLOTS, max_model_len=MAX_LEN, window=48))


@pytest.fixture(scope="module")
def benches(target: Path) -> Callable[[str], Bench]:
    @cache
    def bench_of(name: str) -> Bench:
        batch, kinds, engine_args = BENCHES[name]
        if engine_args is not INVARIANT and native.load() is None:
            pytest.skip("needs the compiled library")
        return Bench(target, batch, kinds, **engine_args)

    return bench_of


def drafter_of(worker: LocalWorker, *, uses_cache: bool, **settings: Any) -> HybridDrafter:
    """What the factory makes of a worker."""
    values = {name: getattr(CONFIG, name) for name in CONFIG.__slots__} | settings
    proposer = DraftModelProposer(
        as_any(worker), DraftModelConfig(**values), slots=SLOTS, vocab_size=VOCAB,
        max_positions=MAX_LEN,
    )  # fmt: skip
    config = LookaheadConfig(
        cache_mode=3, voc_size=VOCAB, max_seq_len=MAX_LEN, eos_token_id=(2,), token_paths_top_k=3,
        num_threads=1,
    )  # fmt: skip
    return HybridDrafter(
        config, width=MAX_LEN, capacity=1 << 14 if uses_cache else 0, uses_cache=uses_cache,
        model=proposer,
    )  # fmt: skip


class Misfortune:
    """Crashes a worker or makes it stand still, now and then."""

    def __init__(self, seed: int, often: float) -> None:
        self._rng, self._often = random.Random(seed), often

    def __call__(self, worker: LocalWorker) -> None:
        if self._rng.random() < self._often:
            if self._rng.random() < 0.5:
                worker.crash(self._rng.randrange(1, 6))
            else:
                worker.stands_still = not worker.stands_still
        if worker.stands_still and self._rng.random() < 0.1:
            worker.crash(self._rng.randrange(1, 6))  # as who is silent for too long


def check_traffic(bench: Bench, counts: Counter[str]) -> None:
    assert counts["aborted"] > 0 and counts["prefix_cache_hits"] > 0
    assert bench.batch == 1 or counts["num_preemptions"] > 0


@pytest.mark.parametrize("uses_cache", [False, True], ids=["alone", "beside the cache"])
@pytest.mark.parametrize("where", BENCHES)
def test_the_tokens_are_those_without_drafts(
    benches: Callable[[str], Bench], draft_model: DraftModel, where: str, uses_cache: bool
) -> None:
    bench = benches(where)
    bench.forget()
    worker = LocalWorker(draft_model, Setting(slots=SLOTS, max_model_len=MAX_LEN, window=48))
    drafter = drafter_of(worker, uses_cache=uses_cache)
    different, counts = bench.serve(drafter)
    metrics = drafter.metrics()
    drafter.shut_down()
    assert different == []
    check_traffic(bench, counts)
    assert counts["num_accepted_tokens"] > 0.15 * counts["generation_tokens"]
    assert metrics["draft_hits"] > 0.2 * counts["generation_tokens"]
    assert metrics["draft_worker_up"] == 1 and metrics["draft_restarts"] == 0


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("where", ["native fast 7", "invariant 7"])
def test_crashes_and_standstills_change_nothing(
    benches: Callable[[str], Bench], draft_model: DraftModel, where: str, seed: int
) -> None:
    bench = benches(where)
    bench.forget()
    worker = LocalWorker(
        draft_model, Setting(slots=SLOTS, max_model_len=MAX_LEN, window=48),
        turns=seed + 1, before_poll=Misfortune(seed, 0.03),
    )  # fmt: skip
    drafter = drafter_of(worker, uses_cache=seed == 1, overlap=("auto", "enumerate", "off")[seed])
    different, counts = bench.serve(drafter)
    drafter.shut_down()
    assert different == []
    check_traffic(bench, counts)
    assert worker.counters.deaths > 3 and worker.counters.starts > 3
    assert counts["num_accepted_tokens"] > 0.05 * counts["generation_tokens"]
    assert bench.engine.metrics()["kv_cache_usage_perc"] == 0
    assert bench.engine.metrics()["num_requests_running"] == 0


def test_every_row_is_given_back(benches: Callable[[str], Bench], draft_model: DraftModel) -> None:
    """After all requests have ended neither side holds a sequence."""
    bench = benches("native fast 7")
    worker = LocalWorker(draft_model, Setting(slots=SLOTS, max_model_len=MAX_LEN, window=48))
    drafter = drafter_of(worker, uses_cache=False)
    bench.serve(drafter)
    for _ in range(3):
        drafter.run_deferred()
        worker.poll()
    proposer = drafter.model
    assert isinstance(proposer, DraftModelProposer)
    proposer.check_integrity()
    assert proposer.num_sequences == 0
    assert (worker.bed.worker.tree_pool.lengths == 0).all()
    assert not any(len(draft_model.kv_layout.token_ids(slot)) for slot in range(SLOTS))
    drafter.shut_down()


# -- what fits ----------------------------------------------------------------------------------

PLAN = CorePlan((0,), (0,), shared=True)


def start(model: Path, target: Path, *, checks_tokenizer: bool = True) -> None:
    """Starts the worker and ends it again."""
    tokenizer = None
    if checks_tokenizer:
        tokenizer = load_tokenizer(target, mode="auto", trust_remote_code=False)
    config = DraftModelConfig(str(model), None, 5, None, 1, "auto", "auto", None, False)
    start_draft_model(
        config, load_model_config(target), tokenizer, plan=PLAN, slots=2, max_model_len=64,
        load_format="auto",
    ).worker.close()  # fmt: skip


@pytest.mark.parametrize(
    ("wanted", "dtype", "weight_format"),
    [
        ("auto", "bfloat16", "auto"),
        ("int4", "bfloat16", "int4"),
        ("int8", "bfloat16", "int8"),
        ("bfloat16", "bfloat16", "bf16"),
        ("float32", "float32", "float"),
    ],
)
def test_the_worker_is_told_its_weights(
    draft_folder: Path, monkeypatch: pytest.MonkeyPatch, wanted: str, dtype: str, weight_format: str
) -> None:
    told: list[WorkerSettings] = []
    monkeypatch.setattr(worker_client, "DraftWorkerClient", lambda given, **_: told.append(given))
    config = DraftModelConfig(str(draft_folder), None, 5, None, 1, wanted, "auto", None, False)
    start_draft_model(
        config, load_model_config(draft_folder), None, plan=PLAN, slots=2, max_model_len=64,
        load_format="auto",
    )  # fmt: skip
    assert [(s.dtype, s.weight_format) for s in told] == [(dtype, weight_format)]


def test_another_size_of_vocabulary(target: Path, tmp_path: Path) -> None:
    model = make_tiny_checkpoint(tmp_path / "draft", "llama")
    reason = "its vocabulary has 96 tokens, the target's 259: a draft model must share the target's"
    for checks in (False, True):
        with pytest.raises(ConfigError, match=f"speculative_model='.*': {reason} tokenizer$"):
            start(model, target, checks_tokenizer=checks)


def test_another_tokenizer(target: Path, draft_folder: Path, tmp_path: Path) -> None:
    model = tmp_path / "draft"
    model.mkdir()
    for file in draft_folder.iterdir():
        (model / file.name).write_bytes(file.read_bytes())
    start(model, target)
    tokenizer = model / "tokenizer.json"
    text = tokenizer.read_text(encoding="utf-8")
    first, second = '"a":', '"b":'
    assert first in text and second in text
    swapped = text.replace(first, '"\\u0000":').replace(second, first).replace('"\\u0000":', second)
    tokenizer.write_text(swapped, encoding="utf-8")
    with pytest.raises(ConfigError, match="its tokenizer is another one than the target's"):
        start(model, target)
    start(model, target, checks_tokenizer=False)
    for file in model.glob("*token*"):
        file.unlink()
    start(model, target)  # a draft model may come without one


def test_no_such_model(target: Path, tmp_path: Path) -> None:
    with pytest.raises(ModelLoadError, match="no/such"):
        start(tmp_path / "no/such", target)


def engine_config(target: Path, **given: Any) -> EngineConfig:
    args = {"model": str(target), "num_speculative_tokens": 4, "cpu_draft_worker": True, **given}
    return EngineConfig.from_args(resolve_engine_args(args))


def test_without_a_draft_model_nothing_starts(target: Path) -> None:
    config = EngineConfig.from_args(resolve_engine_args({"model": str(target)}))
    prepared = prepare_draft_model(
        config, load_model_config(target), None, target_on_cpu=True, max_model_len=64
    )
    assert prepared == (config, None)


def test_optional_or_not_threads_have_to_be_there(target: Path, draft_folder: Path) -> None:
    for optional in (False, True):
        wanted = {"speculative_model": str(draft_folder), "draft_threads": 10**6}
        config = engine_config(target, **wanted, draft_optional=optional)
        of_target = load_model_config(target)
        with pytest.raises(ConfigError, match="draft_threads=1000000: this process may use "):
            prepare_draft_model(config, of_target, None, target_on_cpu=True, max_model_len=64)


@pytest.mark.parametrize("fault", ["missing", "vocabulary"])
def test_an_optional_model_that_does_not_fit(
    target: Path, tmp_path: Path, fault: str, caplog: pytest.LogCaptureFixture
) -> None:
    model = tmp_path / "draft"
    if fault == "vocabulary":
        make_tiny_checkpoint(model, "llama")
    wanted = {"speculative_model": str(model)}
    of_target = load_model_config(target)
    with pytest.raises((ConfigError, ModelLoadError)) as caught:
        prepare_draft_model(
            engine_config(target, **wanted), of_target, None, target_on_cpu=True, max_model_len=64
        )
    config = engine_config(target, **wanted, draft_optional=True)
    prepared = prepare_draft_model(config, of_target, None, target_on_cpu=True, max_model_len=64)
    assert prepared == (config, None)
    assert f"serving without the draft model: {caught.value}" in caplog.text


def test_the_context_is_the_shortest_of_all(draft_folder: Path, tmp_path: Path) -> None:
    """A longer text is not drafted for; the target goes on."""
    short = tmp_path / "draft"
    short.mkdir()
    for file in draft_folder.iterdir():
        (short / file.name).write_bytes(file.read_bytes())
    rewrite_config(short, max_position_embeddings=50)
    target = load_model_config(draft_folder)
    for longest, expected in ((None, 50), (40, 40)):
        config = DraftModelConfig(str(short), None, 5, longest, 1, "auto", "auto", None, False)
        model = start_draft_model(
            config, target, None, plan=PLAN, slots=2, max_model_len=112, load_format="auto"
        )
        model.worker.close()
        assert model.max_positions == expected
    config = DraftModelConfig(str(short), None, 5, 51, 1, "auto", "auto", None, False)
    reason = r"exceeds the draft model's context length \(50\)"
    with pytest.raises(ConfigError, match=f"^speculative_max_model_len=51: {reason}"):
        start_draft_model(
            config, target, None, plan=PLAN, slots=2, max_model_len=112, load_format="auto"
        )
