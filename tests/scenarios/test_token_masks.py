"""Guided requests whose masks the native executor applies get the tokens that the torch sampler
gives them, without drafts and with right, wrong and misleading ones."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from transformers import AutoTokenizer

from hetero_llm import SamplingParams, StructuredOutputsParams
from hetero_llm.core.drafter import Drafter
from hetero_llm.core.grammar import Grammar, GrammarMatcher
from hetero_llm.core.outputs import RequestOutput
from hetero_llm.cpu import native
from hetero_llm.cpu.executor import Executor
from hetero_llm.engine.engine import Engine
from hetero_llm.engine.inputs.input_processor import Prompt
from hetero_llm.engine.text.tokenizer import Tokenizer
from hetero_llm.structured_output.compiler import GrammarCompiler
from tests.helpers.draft_traffic import VOCAB, Item, Served, build, make_model, make_traffic, serve
from tests.helpers.drafters import Garbage, Oracle, Record, Siblings, Switch

pytestmark = pytest.mark.skipif(native.load() is None, reason="needs the compiled library")

BATCH = 7
SCHEMA = {
    "type": "object",
    "properties": {"a": {"type": "boolean"}, "b": {"enum": ["x", "yy"]}},
    "required": ["a", "b"],
    "additionalProperties": False,
}
JSON = r'\{"a":(true|false),"b":"(x|yy)"\}'
WORDS = r"(ab|cd|[0-9]{2})(,(ab|cd|[0-9]{2}))*"
CHOICE = ["yes", "no", "perhaps", "no way"]
GREEDY, HOT = SamplingParams(temperature=0), SamplingParams(temperature=1.0)


def guided(params: SamplingParams, **constraint: Any) -> SamplingParams:
    return replace(params, structured_outputs=StructuredOutputsParams(**constraint))


def guided_json(params: SamplingParams) -> SamplingParams:
    return guided(params, json=SCHEMA, disable_any_whitespace=True)


KINDS = {
    "to the end": guided(replace(GREEDY, max_tokens=None, ignore_eos=True), regex=WORDS),
    "words": guided(GREEDY, regex=WORDS),
    "free": HOT,
    "json": guided_json(HOT),
    "choice": guided(HOT, choice=CHOICE),
    "samples": guided(replace(HOT, n=3), regex=WORDS),
    "free greedy": GREEDY,
    "json samples": guided_json(replace(HOT, n=2)),
    "stop string": guided(replace(HOT, stop=[",", "4"]), regex=WORDS),
}
PATTERNS = {"json": JSON, "json samples": JSON, "choice": "|".join(CHOICE)}


@pytest.fixture(scope="module", autouse=True)
def one_thread() -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model(tmp_path_factory.mktemp("tiny") / "llama")


@pytest.fixture(scope="module")
def switch() -> Switch:
    return Switch()


@pytest.fixture(scope="module")
def engine(folder: Path, switch: Switch) -> Engine:
    return build(folder, BATCH, switch)


def traffic() -> list[Item]:
    items = [(seed, item) for seed in range(5) for item in make_traffic(seed, BATCH, KINDS)]
    return [replace(item, name=f"{seed}/{item.name}") for seed, item in items]


def by_torch(item: Item) -> Item:
    """The same request with log-probabilities, for which the torch sampler is asked."""
    return replace(item, params=replace(item.params, logprobs=0))


def tokens_of(served: Served) -> dict[str, list[tuple[list[int], str | None]]]:
    return {
        name: [(list(one.token_ids), one.finish_reason) for one in last.outputs]
        for name, last in served.last.items()
    }


@pytest.fixture(scope="module")
def expected(engine: Engine) -> Served:
    return serve(engine, list(map(by_torch, traffic())), aborting=False)


@pytest.fixture(scope="module")
def record(expected: Served) -> Record:
    return {
        (name, one.index): list(one.token_ids)
        for name, last in expected.last.items()
        for one in last.outputs
    }


@pytest.fixture
def no_logits(monkeypatch: pytest.MonkeyPatch) -> None:
    def logits(*_: Any) -> None:
        raise AssertionError("logits were asked for")

    monkeypatch.setattr(Executor, "logits", logits)


DRAFTERS: dict[str, Callable[[Record], Drafter | None]] = {
    "none": lambda _: None,
    "oracle": lambda record: Oracle(record, VOCAB),
    "garbage": lambda record: Garbage(record, VOCAB),
    "siblings": lambda record: Siblings(record, VOCAB),
}


@pytest.mark.parametrize("name", DRAFTERS)
def test_the_tokens_are_those_of_the_torch_sampler(
    engine: Engine,
    switch: Switch,
    expected: Served,
    record: Record,
    name: str,
    no_logits: None,
) -> None:
    switch.drafter = DRAFTERS[name](record)
    before = engine.metrics()
    served = serve(engine, traffic())
    switch.drafter = None
    wanted, ours = tokens_of(expected), tokens_of(served)
    for request, outputs in ours.items():
        if outputs[0][1] == "abort":
            assert outputs[0][0] == wanted[request][0][0][: len(outputs[0][0])], request
        else:
            assert outputs == wanted[request], request
    after = engine.metrics()
    assert after["num_preemptions"] > before["num_preemptions"] and served.counts["aborted"] > 0
    if name == "oracle":
        accepted = "spec_decode_num_accepted_tokens"
        assert after[accepted] - before[accepted] > 200
    engine.scheduler.check_integrity()


def test_outputs_follow_their_grammars(expected: Served) -> None:
    complete = 0
    for name, last in expected.last.items():
        pattern = PATTERNS.get(name.partition(": ")[2])
        for one in last.outputs if pattern else ():
            if one.finish_reason == "stop":
                assert re.fullmatch(str(pattern), one.text), (name, one.text)
                complete += 1
    assert complete > 5


@pytest.mark.parametrize("drafts", [False, True])
def test_a_grammar_that_begins_inside_a_draft(
    engine: Engine, switch: Switch, folder: Path, drafts: bool, no_logits: None
) -> None:
    """What comes before is free; the boundary is found within an accepted draft."""
    prompt = Prompt(None, [40, 50, 60, 70])

    def run(name: str, params: SamplingParams) -> list[int]:
        engine.add_request(engine.make_request(name, prompt, params))
        done: list[int] = []
        while engine.has_unfinished:
            for output in engine.step():
                assert output.error is None
                done = list(output.outputs[0].token_ids)
        return done

    free = run("free", replace(GREEDY, max_tokens=16, ignore_eos=True))
    boundary = free[5:7]
    before = next(i for i in range(len(free)) if free[i : i + 2] == boundary) + 2
    params = guided(replace(GREEDY, max_tokens=24), regex=r"[a-c]{4}!", begins_after=boundary)
    if drafts:
        plain = run("plain", params)
        switch.drafter = Oracle({("again", 0): plain}, VOCAB, seed=3)
        assert run("again", params) == plain
        switch.drafter = None
        return
    output = run("guided", params)
    assert output[:before] == free[:before]
    text = AutoTokenizer.from_pretrained(folder).decode(output[before:-1])
    assert re.fullmatch(r"[a-c]{4}!", text) and output[-1] == 2


class FailingLater:
    """A matcher that fails behind its `left`-th token from here, as a parser at its limit does."""

    def __init__(self, matcher: GrammarMatcher, left: int) -> None:
        self._matcher, self._left = matcher, left

    @property
    def error(self) -> str | None:
        return "at its limit" if self._left <= 0 else self._matcher.error

    def observe(self, token_id: int) -> None:
        self._left -= 1
        self._matcher.observe(token_id)

    def try_observe(self, token_id: int) -> bool:
        if not self._matcher.try_observe(token_id):
            return False
        self._left -= 1
        return True

    def copy(self) -> GrammarMatcher:
        return FailingLater(self._matcher.copy(), self._left)

    def fill_mask(self, mask: NDArray[np.int32]) -> bool:
        if self.error is not None:
            mask.fill(0)
            return True
        return self._matcher.fill_mask(mask)


@pytest.mark.parametrize("name", ["none", "oracle"])
@pytest.mark.parametrize("logprobs", [None, 0])
def test_a_grammar_that_fails_ends_its_request_alone(
    folder: Path, name: str, logprobs: int | None
) -> None:
    switch = Switch()
    engine = build(folder, BATCH, switch)
    params = guided(replace(GREEDY, max_tokens=12, logprobs=logprobs), regex=r"(ab|cd){20}")

    def run(names: tuple[str, ...]) -> dict[str, RequestOutput]:
        for request in names:
            engine.add_request(engine.make_request(request, Prompt(None, [9, 8, 7]), params))
        last: dict[str, RequestOutput] = {}
        while engine.has_unfinished:
            last |= {output.request_id: output for output in engine.step()}
        return last

    good = list(run(("good",))["good"].outputs[0].token_ids)
    assert len(good) == 12
    tokenizer = Tokenizer(AutoTokenizer.from_pretrained(folder))
    vocabulary = tokenizer.vocabulary(VOCAB, (2,))
    grammars, opens = GrammarCompiler(vocabulary), iter([5, 1000])

    def open_failing(grammar: Grammar, output_ids: Any) -> GrammarMatcher:
        return FailingLater(grammars.open(grammar, output_ids), next(opens))

    engine.runner.set_open_matcher(open_failing)
    record = {("bad", 0): good, ("good", 0): good}
    switch.drafter = DRAFTERS[name](record)
    last = run(("bad", "good"))
    assert last["bad"].error == "at its limit"
    assert last["good"].error is None and list(last["good"].outputs[0].token_ids) == good
    if name == "none":
        assert list(last["bad"].outputs[0].token_ids) == good[:5]


@pytest.mark.parametrize(("most", "drafted"), [(None, True), (0, False)])
def test_a_request_may_forgo_drafts_of_forced_tokens(
    folder: Path, most: int | None, drafted: bool
) -> None:
    engine = build(folder, BATCH, None)
    params = guided(
        replace(GREEDY, max_tokens=12, num_speculative_tokens=most), choice=["abcdefghij"]
    )
    engine.add_request(engine.make_request("forced", Prompt(None, [5, 6, 7]), params))
    while engine.has_unfinished:
        engine.step()
    assert (engine.metrics()["spec_decode_num_draft_tokens"] > 0) == drafted
