"""The engine over the GPU runner, stepping asynchronously and with drafts, against the torch runner
stepping synchronously: in Triton's interpreter or on a GPU, without graphs."""

from __future__ import annotations

import re
import threading
from dataclasses import replace
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from bench.speculation.synthetic_drafter import SyntheticDrafter
from hetero_llm import SamplingParams, StructuredOutputsParams
from hetero_llm.config.engine_config import SchedulerConfig
from hetero_llm.core.drafter import Drafter
from hetero_llm.core.grammar import Grammar, GrammarMatcher
from hetero_llm.core.step import SchedulerOutput
from hetero_llm.engine.engine import Engine
from hetero_llm.engine.inputs.input_processor import InputProcessor, Prompt
from hetero_llm.engine.output_processor import OutputProcessor
from hetero_llm.gpu.fused import speed_up
from hetero_llm.gpu.model_runner import GpuModelRunner
from hetero_llm.kv_cache.block_manager import BlockManager
from hetero_llm.kv_cache.prefix_cache import PrefixCache
from hetero_llm.models.loader import load_model
from hetero_llm.models.read_config import load_model_config
from hetero_llm.runner.kv_cache import KVCacheShape, PagedKVCache
from hetero_llm.runner.model_runner import TorchModelRunner
from hetero_llm.scheduler.forced_token_pace import ForcedTokenPace, PaceByShare
from hetero_llm.scheduler.grammar_drafts import GrammarDrafts
from hetero_llm.scheduler.scheduler import Scheduler
from hetero_llm.structured_output.compiler import GrammarCompiler, Vocabulary
from hetero_llm.structured_output.draft_matcher import DraftMatcher
from tests.models.tiny import VOCAB_SIZE, make_tiny_checkpoint

SEQS, BLOCKS, BUDGET, MAX_LEN = 4, 9, 24, 64
Work = list[tuple[list[int], SamplingParams]]
LETTERS = Vocabulary(
    None,
    lambda token: bytes([32 + token]) if token > 2 else b"",
    {},
    VOCAB_SIZE,
    (2,),
)
"""Token t above 2 is the character 32 + t; 2 ends a text."""


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("llama")
    layers = 2 if torch.cuda.is_available() else 1  # the interpreter takes seconds for each
    return make_tiny_checkpoint(folder, "llama", "heads_of_16", layers=layers)


def start(
    checkpoint: Path,
    device: torch.device,
    *,
    ours: bool,
    drafter: Drafter | None = None,
    graphs: bool = False,
    most_looks: int = 1 << 30,
    forced: int = 0,
    pace: ForcedTokenPace | None = None,
) -> tuple[Engine, Scheduler]:
    """`forced`: most tokens of a step that verifies forced tokens without a drafter, in the steps
    that `pace` chooses; None: in all of the work's."""
    config = load_model_config(checkpoint)
    model = load_model(checkpoint, config, dtype=torch.float32, device=device, show_progress=False)
    shape = KVCacheShape(config.num_layers, config.num_kv_heads, config.head_dim, 16, torch.float32)
    cache = PagedKVCache(shape, BLOCKS, device)
    runner: GpuModelRunner | TorchModelRunner
    if ours:
        speed_up(model)
        runner = GpuModelRunner(
            model,
            config,
            cache,
            max_num_seqs=SEQS,
            max_model_len=MAX_LEN,
            max_num_batched_tokens=BUDGET,
            graphs=graphs,
            most_drafted_tokens=forced if drafter is None else BUDGET,
            most_looks=most_looks,
        )
    else:
        runner = TorchModelRunner(
            model, config, cache, max_num_seqs=SEQS, max_model_len=MAX_LEN, device=device
        )
    grammars = GrammarCompiler(LETTERS)
    scheduler = Scheduler(
        SchedulerConfig(SEQS, BUDGET, MAX_LEN, True, 16),
        BlockManager(BLOCKS, 16, PrefixCache()),
        drafter=drafter,
        grammar_drafts=GrammarDrafts(
            partial(grammars.open_as, DraftMatcher), pace or PaceByShare(), most_tokens=forced
        )
        if forced
        else None,
    )
    runner.set_open_matcher(grammars.open)
    inputs = InputProcessor(
        None,
        vocab_size=VOCAB_SIZE,
        max_model_len=MAX_LEN,
        eos_ids=(2,),
        max_logprobs=5,
        seed=0,
        grammars=grammars,
    )
    outputs = OutputProcessor(None, scheduler.stop_sequence)
    engine = Engine(inputs, scheduler, runner, outputs, asynchronous=ours, grammars=grammars)
    return engine, scheduler


def run(engine: Engine, work: Work) -> dict[str, list[tuple[list[int], str | None]]]:
    """Half of the requests at once, the others one at a time."""
    requests = [
        engine.make_request(str(i), Prompt(token_ids=ids), params)
        for i, (ids, params) in enumerate(work)
    ]
    late = requests[len(requests) // 2 :]
    for request in requests[: len(requests) // 2]:
        engine.add_request(request)
    done = {}
    while engine.has_unfinished or late:
        if late:
            engine.add_request(late.pop(0))
        for output in engine.step():
            if output.finished:
                texts = [(list(c.token_ids), c.finish_reason) for c in output.outputs]
                done[output.request_id] = texts
    return done


def mixed_work() -> Work:
    rng = np.random.default_rng(1)
    whole_blocks = rng.integers(3, 90, 16).tolist()

    def ids(count: int) -> list[int]:
        return rng.integers(3, 90, count).tolist()

    def params(**given: object) -> SamplingParams:
        return SamplingParams(detokenize=False, **given)  # type: ignore[arg-type]

    return [
        (whole_blocks, params(temperature=0.0, max_tokens=2)),
        (ids(26), params(seed=1, top_p=0.9, top_k=20, max_tokens=3, n=2)),
        (ids(5), params(seed=2, max_tokens=4, stop_token_ids=list(range(3, 50)))),
        (whole_blocks, params(temperature=0.0, max_tokens=3)),
        (ids(10), params(seed=3, max_tokens=2, logprobs=1)),
        (ids(4), params(temperature=0.0, max_tokens=2, repetition_penalty=1.3)),
    ]


def test_asynchronous_steps_give_the_same_tokens(checkpoint: Path, device: torch.device) -> None:
    expected = run(start(checkpoint, device, ours=False)[0], mixed_work())
    engine, scheduler = start(checkpoint, device, ours=True)
    assert run(engine, mixed_work()) == expected
    scheduler.check_integrity()
    assert scheduler.stats.prefix_cache_hits >= 15  # all but the last token of a known prompt


def test_drafted_steps_give_the_same_tokens(checkpoint: Path, device: torch.device) -> None:
    params = SamplingParams(temperature=0.0, max_tokens=8, detokenize=False, ignore_eos=True)
    work = [(ids, params) for ids, _ in mixed_work()[:3]]
    expected = run(start(checkpoint, device, ours=False)[0], work)
    record = {tuple(ids): expected[str(i)][0][0] for i, (ids, _) in enumerate(work)}
    drafter = SyntheticDrafter(record, right=2, nodes=4, vocab_size=VOCAB_SIZE)
    engine, scheduler = start(checkpoint, device, ours=True, drafter=drafter)
    assert run(engine, work) == expected
    scheduler.check_integrity()
    assert scheduler.stats.num_accepted_tokens >= 8


def test_drafts_beside_requests_that_look_back(checkpoint: Path, device: torch.device) -> None:
    """Their steps are walked by depth; without graphs the model alone runs before."""
    (first, _), (second, _), (third, _) = mixed_work()[:3]
    given = {"max_tokens": 5, "detokenize": False, "ignore_eos": True}
    greedy = SamplingParams(temperature=0.0, **given)
    work = [
        (first, greedy),
        (second, replace(greedy, repetition_penalty=1.5, logprobs=1)),
        (third, replace(greedy, temperature=1.0, seed=5, no_repeat_ngram_size=1)),
    ]
    expected = run(start(checkpoint, device, ours=False)[0], work)
    record = {tuple(ids): expected[str(i)][0][0] for i, (ids, _) in enumerate(work)}
    drafter = SyntheticDrafter(record, right=2, nodes=3, vocab_size=VOCAB_SIZE)
    engine, scheduler = start(checkpoint, device, ours=True, drafter=drafter)
    assert run(engine, work) == expected
    scheduler.check_integrity()
    assert scheduler.stats.num_accepted_tokens >= 6


# -- token masks ----------------------------------------------------------------------------------


def guided_work(count: int = 7) -> Work:
    """Grammars beside free sampling, forks, log-probabilities, thresholds and other processors."""
    rng = np.random.default_rng(4)

    def ids(length: int) -> list[int]:
        return rng.integers(3, 90, length).tolist()

    def params(regex: str | None, **given: object) -> SamplingParams:
        constraint = None if regex is None else StructuredOutputsParams(regex=regex)
        return SamplingParams(detokenize=False, structured_outputs=constraint, **given)  # type: ignore[arg-type]

    words = "(ab|cd)(-(ab|[0-9]+))*"
    work = [
        (ids(5), params(words, temperature=0.0, max_tokens=5)),
        (ids(26), params(words, seed=1, n=2, max_tokens=4)),
        (ids(4), params(None, temperature=0.0, max_tokens=4)),
        (ids(9), params("[a-d]{2}", seed=2, top_k=9, top_p=0.9, max_tokens=6)),
        (ids(3), params("[a-z]+", seed=3, logprobs=1, max_tokens=3)),
        (ids(6), params("[x-z]+!", temperature=0.0, frequency_penalty=1.0, max_tokens=3)),
        (ids(7), params("yes|no", seed=5, max_tokens=5)),
    ]
    return work[:count]


def test_guided_steps_give_the_tokens_of_the_torch_sampler(
    checkpoint: Path, device: torch.device
) -> None:
    """Steps are launched before the tokens that their masks depend on have reached the host."""
    expected = run(start(checkpoint, device, ours=False)[0], guided_work())
    engine, scheduler = start(checkpoint, device, ours=True)
    assert run(engine, guided_work()) == expected
    scheduler.check_integrity()
    texts = {
        name: "".join(chr(32 + token) for token in outputs[0][0] if token != 2)
        for name, outputs in expected.items()
    }
    assert re.fullmatch("[a-d]{2}", texts["3"]) and texts["6"] in ("yes", "no")


def test_guided_steps_are_launched_ahead(checkpoint: Path, device: torch.device) -> None:
    engine, scheduler = start(checkpoint, device, ours=True)
    ahead = []
    schedule_ahead = scheduler.schedule_ahead

    def watched() -> SchedulerOutput | None:
        step = schedule_ahead()
        ahead.append(step is not None)
        return step

    scheduler.schedule_ahead = watched  # type: ignore[method-assign]
    run(engine, guided_work(2))
    assert sum(ahead) >= 5


def test_guided_drafts_give_the_same_tokens(checkpoint: Path, device: torch.device) -> None:
    work = [guided_work()[i] for i in (0, 2, 3, 6)]
    expected = run(start(checkpoint, device, ours=False)[0], work)
    record = {tuple(ids): expected[str(i)][0][0] for i, (ids, _) in enumerate(work)}
    drafter = SyntheticDrafter(record, right=2, nodes=4, vocab_size=VOCAB_SIZE)
    engine, scheduler = start(checkpoint, device, ours=True, drafter=drafter)
    assert run(engine, work) == expected
    scheduler.check_integrity()
    assert scheduler.stats.num_accepted_tokens >= 4


def test_a_mask_that_never_comes_fails_its_request_alone(
    checkpoint: Path, device: torch.device
) -> None:
    """The grammar of one request takes longer than its step waits."""
    engine, _ = start(checkpoint, device, ours=True, most_looks=200)
    slow = threading.Event()
    grammars = GrammarCompiler(LETTERS)

    class Slow:
        """A matcher whose masks take until the step is over."""

        error = None

        def __init__(self, matcher: GrammarMatcher) -> None:
            self._matcher = matcher

        def observe(self, token_id: int) -> None:
            self._matcher.observe(token_id)

        def fill_mask(self, mask: NDArray[np.int32]) -> bool:
            slow.wait(10)
            return self._matcher.fill_mask(mask)

    engine.runner.set_open_matcher(lambda *opened: Slow(grammars.open(*opened)))
    requests = [
        engine.make_request(str(i), Prompt(token_ids=ids), params)
        for i, (ids, params) in enumerate(guided_work(3))
        if i != 1
    ]
    for request in requests:
        engine.add_request(request)
    last = {}
    launch = engine.runner.launch

    def launch_and_go(step: SchedulerOutput) -> object:
        launched = launch(step)
        if device.type == "cuda":
            torch.cuda.synchronize()
        slow.set()  # the step has given up
        return launched

    engine.runner.launch = launch_and_go  # type: ignore[method-assign]
    while engine.has_unfinished:
        last |= {output.request_id: output for output in engine.step()}
    assert last["0"].error == "its token mask was not ready in time"
    assert last["2"].error is None and last["2"].outputs[0].finish_reason == "length"


def test_forced_tokens_are_drafted_without_a_drafter(
    checkpoint: Path, device: torch.device
) -> None:
    expected = run(start(checkpoint, device, ours=False)[0], guided_work())
    engine, scheduler = start(checkpoint, device, ours=True, forced=6)
    assert run(engine, guided_work()) == expected
    assert scheduler.stats.num_accepted_tokens >= 3
    scheduler.check_integrity()


class OneOfThree(PaceByShare):
    """Pauses behind each step for which forced tokens were looked for, for two steps."""

    reports: list[tuple[int, int, bool]]

    def __init__(self) -> None:
        super().__init__()
        self.reports = []
        self.waits = 0

    @property
    def paused(self) -> bool:
        return self.waits > 0

    def looked(self, num_sequences: int, num_forced: int) -> None:
        self.waits = 3  # this launch counts, too

    def launched(self, num_running: int) -> None:
        self.waits = max(self.waits - 1, 0)

    def observe_step(
        self, num_sequences: int, seconds: float, num_sampled: int, *, looked: bool
    ) -> None:
        assert seconds > 0
        self.reports.append((num_sequences, num_sampled, looked))


def test_a_pause_of_forced_tokens_changes_no_token(checkpoint: Path, device: torch.device) -> None:
    """Steps that wait for all tokens and steps launched ahead of them follow each other, in a batch
    of sequences of which some have forced tokens, some have a grammar and one is free."""
    expected = run(start(checkpoint, device, ours=False)[0], guided_work())
    pace = OneOfThree()
    engine, scheduler = start(checkpoint, device, ours=True, forced=6, pace=pace)
    assert run(engine, guided_work()) == expected
    scheduler.check_integrity()
    assert scheduler.stats.num_accepted_tokens >= 2 and scheduler.stats.num_steps_ahead >= 1
    tried = [(count, sampled) for count, sampled, looked in pace.reports if looked]
    others = [(count, sampled) for count, sampled, looked in pace.reports if not looked]
    assert any(sampled > count for count, sampled in tried)
    assert others and all(sampled <= count for count, sampled in others)
    assert max(count for count, _ in tried) > 1


def test_a_new_grammar_is_compiled_behind_the_launch(
    checkpoint: Path, device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    ids, params = guided_work()[0]
    expected = run(start(checkpoint, device, ours=False)[0], [(ids, params)])
    engine, _ = start(checkpoint, device, ours=True)
    order: list[str] = []
    make, launch = GrammarCompiler.prepare, engine.runner.launch

    def prepare(compiler: GrammarCompiler, grammar: Grammar) -> None:
        order.append("compile")
        make(compiler, grammar)

    def launched(step: SchedulerOutput) -> object:
        result = launch(step)
        order.append("launched")
        return result

    monkeypatch.setattr(GrammarCompiler, "prepare", prepare)
    engine.runner.launch = launched  # type: ignore[method-assign]
    request = engine.input_processor.make_request(
        "0", Prompt(token_ids=ids), params, check_grammar=False
    )
    engine.add_request(request)
    found = []
    while engine.has_unfinished:
        found += [list(one.outputs[0].token_ids) for one in engine.step() if one.finished]
    assert found == [tokens for tokens, _ in expected["0"]]
    assert order.count("compile") == 1 and order.index("compile") > order.index("launched")
