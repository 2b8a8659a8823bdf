"""Random traffic through an engine over the fake runner, and all that may be seen of it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from hypothesis import strategies as st

from hetero_llm import SamplingParams
from hetero_llm.core.errors import PromptError
from hetero_llm.core.outputs import RequestOutput
from hetero_llm.core.request import Request
from hetero_llm.engine.engine import Engine
from hetero_llm.engine.output_processor import OutputProcessor
from hetero_llm.engine.text.stop_strings import holds_stop
from hetero_llm.kv_cache.block_manager import BlockManager
from hetero_llm.scheduler.scheduler import Scheduler
from tests.helpers.harness import FakeRunner, make_request, make_scheduler

MAX_LEN = 72


class LetterTokenizer:
    """Every token is one of five letters."""

    added_tokens: dict[int, str] = {}

    def decode_stream(self, prompt_ids: Sequence[int], *, skip_special_tokens: bool) -> Any:
        return self

    def push(self, token_id: int) -> str:
        return "abcde"[token_id % 5]

    def flush(self) -> str:
        return ""

    def decode_token_at(self, token_ids: Sequence[int], position: int, token_id: int) -> str:
        return self.push(token_id)


@dataclass
class Served:
    engine: Engine
    scheduler: Scheduler
    blocks: BlockManager
    runner: FakeRunner


def make_engine(asynchronous: bool, **limits: Any) -> Served:
    tokenizer: Any = LetterTokenizer()
    scheduler, blocks, runner = make_scheduler(**limits, holds_stop=partial(holds_stop, tokenizer))
    output_processor = OutputProcessor(tokenizer, scheduler.stop_sequence)
    inputs: Any = None  # requests come ready-made
    engine = Engine(inputs, scheduler, runner, output_processor, asynchronous=asynchronous)
    return Served(engine, scheduler, blocks, runner)


def check_idle(served: Served) -> None:
    """Nothing is left but perhaps a stray step, which the next call finishes silently."""
    assert not served.engine.has_unfinished
    served.scheduler.check_integrity()
    assert served.blocks.num_free == served.blocks.num_blocks
    assert served.engine.step() == []
    launched = sum(event.startswith("launch") for event in served.runner.events)
    assert len(served.runner.events) == 2 * launched
    assert served.engine.step() == []
    assert len(served.runner.events) == 2 * launched
    served.scheduler.check_integrity()


def run_all(served: Served, requests: Sequence[Request]) -> dict[str, RequestOutput]:
    for request in requests:
        served.engine.add_request(request)
    last: dict[str, RequestOutput] = {}
    while served.engine.has_unfinished:
        last |= {output.request_id: output for output in served.engine.step()}
        served.scheduler.check_integrity()
    return last


KINDS: dict[str, dict[str, Any]] = {
    "plain": {},
    "long": {"ignore_eos": True},
    "two": {"n": 2},
    "three": {"n": 3, "ignore_eos": True},
    "ranked": {"n": 1, "best_of": 2},
    "ranked by a stop string": {"n": 2, "best_of": 3, "stop": ["ab", "cde"], "ignore_eos": True},
    "logprobs": {"logprobs": 2, "stop": ["ab", "cde"], "ignore_eos": True},
    "stop token": {"stop_token_ids": list(range(0, 50, 7))},
    "stop string": {"stop": ["ab", "cde"], "ignore_eos": True},
    "kept stop string": {"n": 2, "stop": ["dd"], "include_stop_str_in_output": True},
    "beams": {"use_beam_search": True, "best_of": 2, "temperature": 0},
    "stopped beams": {"use_beam_search": True, "best_of": 3, "temperature": 0, "stop": ["ab"]},
    "late stop string": {"stop": ["a", "cc"], "ignore_eos": True, "min_tokens": 4},
    "min_tokens": {"min_tokens": 4, "stop_token_ids": list(range(0, 50, 5))},
    "penalty": {"presence_penalty": 0.5},
}
MAY_ABORT = ("plain", "long", "stop token", "stop string", "min_tokens", "penalty")

TRAFFIC = st.lists(
    st.tuples(
        st.sampled_from(sorted(KINDS)),
        st.integers(1, 40),  # prompt length
        st.integers(1, 3),  # prompts of one kind share prefixes
        st.integers(4, 24),  # max_tokens
        st.integers(0, 40),  # arrives after this many steps, or when the engine is idle
        st.one_of(st.none(), st.integers(1, 10)),  # aborted when this many tokens are visible
    ),
    min_size=1,
    max_size=9,
)


def seen(output: RequestOutput) -> list[tuple]:
    return [
        (c.index, c.token_ids, c.text, c.finish_reason, c.stop_reason, c.cumulative_logprob)
        + (c.logprobs,)
        for c in output.outputs
    ]


def serve(traffic: list[tuple], asynchronous: bool, **limits: Any) -> tuple[dict, dict, Served]:
    """All last outputs by request and all counters that must not depend on stepping."""
    return serve_on(
        make_engine(asynchronous, max_model_len=MAX_LEN, block_size=4, **limits), traffic
    )


def serve_on(
    served: Served, traffic: list[tuple], settle: Callable[[], None] = lambda: None
) -> tuple[dict, dict, Served]:
    """The same on a given engine; `settle` waits for work that continues while it is idle."""
    engine = served.engine
    arrivals = []
    abort_at: dict[str, int] = {}
    for number, (kind, length, prefix, max_tokens, at, abort) in enumerate(traffic):
        prompt = [(prefix * 5 + i * i) % 50 for i in range(length)]
        params = SamplingParams(**{"max_tokens": max_tokens} | KINDS[kind])
        request = make_request(str(number), prompt, params, MAX_LEN)
        try:
            served.scheduler.check_request(request)
        except PromptError:
            continue
        arrivals.append((at, number, request))
        if abort is not None and kind in MAY_ABORT:
            abort_at[request.request_id] = abort
    arrivals.sort(key=lambda arrival: arrival[:2])
    last: dict[str, list[tuple]] = {}
    for now in range(4000):
        while arrivals and (arrivals[0][0] <= now or not engine.has_unfinished):
            engine.add_request(arrivals.pop(0)[2])
        if not arrivals and not engine.has_unfinished:
            break
        for output in engine.step():
            name = output.request_id
            assert name not in last, "an output after the last one"
            if not output.finished and len(output.outputs[0].token_ids) >= abort_at.get(name, 99):
                aborted = engine.abort(name)
                assert aborted is not None
                output = aborted
            if output.finished:
                last[name] = seen(output)
        served.scheduler.check_integrity()
    else:
        raise AssertionError("no end in sight")
    settle()
    check_idle(served)
    metrics = engine.metrics()
    names = ("num_requests_finished", "prompt_tokens", "generation_tokens")
    return last, {name: metrics[name] for name in names}, served
