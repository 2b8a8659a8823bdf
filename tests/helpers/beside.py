"""Requests of every kind that may have drafts, a drafter that knows the outputs, and comparisons of
what a user sees. For tests on a CPU and on a GPU."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from hetero_llm import SamplingParams
from hetero_llm.config.args import resolve_engine_args
from hetero_llm.config.engine_config import EngineConfig
from hetero_llm.core.draft_tree import DraftBatch, DraftTree, join_trees
from hetero_llm.core.drafter import StepReport
from hetero_llm.core.outputs import RequestOutput
from hetero_llm.core.request import Request, Sequence
from hetero_llm.engine.engine import Engine
from hetero_llm.engine.factory import build_engine
from hetero_llm.engine.inputs.input_processor import Prompt

VOCAB = 259
Outputs = dict[str, RequestOutput]
Work = list[tuple[str, list[int], SamplingParams]]
"""Requests by name."""

# -- requests -----------------------------------------------------------------------------------


class Stateful:
    """A processor that forbids other tokens at each call and records what it was called with."""

    def __init__(self) -> None:
        self.asked: list[list[int]] = []

    def __call__(self, output_ids: list[int], logits: torch.Tensor) -> torch.Tensor:
        self.asked.append(list(output_ids))
        logits[len(self.asked) % 3 :: 3] = -torch.inf
        return logits


GREEDY = SamplingParams(temperature=0, max_tokens=20, ignore_eos=True)
SAMPLED = replace(GREEDY, temperature=1.1, seed=7)
STOPS = list(range(3, VOCAB, 9))
KINDS: dict[str, SamplingParams] = {
    "plain": SAMPLED,
    "repetition": replace(GREEDY, repetition_penalty=1.7),
    "frequency": replace(SAMPLED, frequency_penalty=1.9),
    "presence": replace(GREEDY, presence_penalty=1.5),
    "bad words": replace(SAMPLED, bad_words=["a", "b", "cd", "ef", "q"]),
    "n-grams": replace(GREEDY, no_repeat_ngram_size=1),
    "min tokens": replace(SAMPLED, min_tokens=7, stop_token_ids=STOPS),
    "bias": replace(SAMPLED, logit_bias={5: 4.0, 60: 3.0, 61: -9.0}),
    "allowed": replace(SAMPLED, allowed_token_ids=list(range(20, 80))),
    "processor": SAMPLED,  # and a `Stateful` of its own
    "logprobs": replace(SAMPLED, logprobs=3, stop=["x", "yz", "5"]),
    "prompt logprobs": replace(GREEDY, logprobs=0, prompt_logprobs=2),
    "thresholds": replace(SAMPLED, top_p=0.8, top_k=40, min_p=0.01),
    "samples": replace(SAMPLED, n=3),
    "penalized samples": replace(SAMPLED, n=3, presence_penalty=1.0, logprobs=1),
    "ranked": replace(SAMPLED, n=1, best_of=3, stop=["x", "7"]),
    "beams": replace(GREEDY, use_beam_search=True, n=2, best_of=3),
}
NO_DRAFTS = ("beams",)


def prompts_of(count: int) -> list[list[int]]:
    rng = np.random.default_rng(0)
    stem = rng.integers(3, VOCAB, 16).tolist()
    lengths = [1, 5, 20, 9, 12, 3, 18]
    own = [rng.integers(3, VOCAB, lengths[i % 7]).tolist() for i in range(count)]
    return [stem + tokens if i % 2 else tokens for i, tokens in enumerate(own)]


def work_of(kinds: list[str]) -> Work:
    """Requests by name, with processors of their own."""
    work = []
    for number, (kind, prompt) in enumerate(zip(kinds, prompts_of(len(kinds)), strict=True)):
        params = KINDS[kind]
        if kind == "processor":
            params = replace(params, logits_processors=[Stateful()])
        if not params.greedy:
            params = replace(params, seed=number)
        work.append((f"{number}: {kind}", prompt, params))
    return work


# -- running them -------------------------------------------------------------------------------


class Trees:
    """Random trees along a record of the same requests without drafts.

    Attributes:
        num_nodes: by request id.
    """

    idle = False

    def __init__(self, record: Outputs, right: float = 0.8, most: int = 9) -> None:
        self._record = {
            (name, completion.index): list(completion.token_ids)
            for name, output in record.items()
            for completion in output.outputs
        }
        self._right = right
        self._most = most
        self._rng = np.random.default_rng(5)
        self.num_nodes: Counter[str] = Counter()

    def propose(self, sequences: list[Sequence], limits: list[int], num_rows: int) -> DraftBatch:
        return join_trees(map(self._tree, sequences, limits))

    def close(self, request: Request) -> None:
        pass

    def observe_step(self, report: StepReport) -> None:
        pass

    def run_deferred(self) -> None:
        pass

    def _tree(self, sequence: Sequence, limit: int) -> DraftTree:
        rng = self._rng
        name = sequence.request.request_id
        known = self._record.get((name, sequence.index), [])
        coming = known[len(sequence.token_ids) - sequence.num_prompt_tokens :]
        tokens: list[int] = []
        parents: list[int] = []
        depths: list[int] = []
        for node in range(rng.integers(0, min(limit, self._most) + 1)):
            parent = node - 1 if rng.random() < 0.6 else int(rng.integers(-1, node))
            depth = 0 if parent < 0 else depths[parent] + 1
            right = depth < len(coming) and rng.random() < self._right
            tokens.append(coming[depth] if right else int(rng.integers(VOCAB)))
            parents.append(parent)
            depths.append(depth)
        self.num_nodes[name] += len(tokens)
        return DraftTree(np.array(tokens, np.int32), np.array(parents, np.int32))


def build(model: Path | str, drafter: Any = None, **engine_args: Any) -> Engine:
    given = {
        "model": str(model),
        "device": "cpu",
        "dtype": "float32",
        "block_size": 8,
        "max_num_seqs": 24,
        "max_num_batched_tokens": 200,
        "num_gpu_blocks_override": 200,
        "disable_log_stats": True,
    }
    config = EngineConfig.from_args(resolve_engine_args(given | engine_args))
    return build_engine(config, show_progress=False, drafter=drafter).engine


def serve(engine: Engine, work: Work) -> Outputs:
    for name, prompt, params in work:
        engine.add_request(engine.make_request(name, Prompt(None, prompt), params))
    last: Outputs = {}
    while engine.has_unfinished:
        for output in engine.step():
            last[output.request_id] = output
        engine.scheduler.check_integrity()
    return last


def check_same(ours: Outputs, theirs: Outputs) -> None:
    """Compares everything that a user sees, log-probabilities up to rounding."""
    assert ours.keys() == theirs.keys()
    for name, output in ours.items():
        other = theirs[name]
        assert output.error == other.error, name
        for mine, its in zip(output.outputs, other.outputs, strict=True):
            plain = [replace(c, logprobs=None, cumulative_logprob=None) for c in (mine, its)]
            assert plain[0] == plain[1], name
            check_logprobs(mine.logprobs, its.logprobs)
            if its.cumulative_logprob is not None:
                assert mine.cumulative_logprob == pytest.approx(its.cumulative_logprob, abs=1e-3)
        check_logprobs(output.prompt_logprobs, other.prompt_logprobs)


def check_logprobs(ours: Any, theirs: Any) -> None:
    assert (ours is None) == (theirs is None)
    for mine, other in zip(ours or (), theirs or (), strict=True):
        assert (mine is None) == (other is None)
        for token in other or ():
            assert mine[token].logprob == pytest.approx(other[token].logprob, abs=1e-4)
            assert mine[token].rank == other[token].rank


def check_processors(work: Work, outputs: Outputs) -> None:
    """Each was called once for each token, in order."""
    for name, _, params in work:
        for processor in params.logits_processors or ():
            tokens = outputs[name].outputs[0].token_ids
            assert processor.asked == [list(tokens[:i]) for i in range(len(tokens))]


def num_accepted(engine: Engine) -> int:
    return int(engine.metrics()["spec_decode_num_accepted_tokens"])
