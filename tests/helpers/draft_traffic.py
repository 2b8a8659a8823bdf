"""Requests of every kind on a tiny model, with and without drafts, and where the outputs differ.

Requests arrive while others run, some are aborted, and memory is too short for all of them.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np
import torch
from safetensors.torch import load_file, save_file

from hetero_llm import SamplingParams
from hetero_llm.config.args import resolve_engine_args
from hetero_llm.config.engine_config import EngineConfig
from hetero_llm.core.drafter import Drafter
from hetero_llm.core.outputs import CompletionOutput, RequestOutput, TokenLogprobs
from hetero_llm.engine.engine import Engine
from hetero_llm.engine.factory import build_engine
from hetero_llm.engine.inputs.input_processor import Prompt
from tests.helpers.drafters import Record, Switch
from tests.models.tiny import make_tiny_checkpoint, rewrite_config

VOCAB = 259
MAX_LEN = 112
BLOCKS = {1: 16, 7: 18, 64: 130}
"""KV blocks by batch size: a sequence of full length takes 14."""
STEP_TOKENS = {1: 80, 7: 120, 64: 600}
"""Token budget of a step by batch size."""
LONGEST = {1: 18, 7: 26, 64: 16}
"""Longest output by batch size, but for the first of the kind "to the end"."""

_LETTERS = list("abcdefghijklmnopqrst")
_GREEDY = SamplingParams(temperature=0)
_MILD = SamplingParams(temperature=0.7)
_HOT = SamplingParams(temperature=1.0)


class Nth:
    """A processor with a state: which tokens a call forbids depends on those before."""

    def __init__(self) -> None:
        self._num_calls = 0

    def __call__(self, output_ids: list[int], logits: torch.Tensor) -> torch.Tensor:
        self._num_calls += 1
        logits[self._num_calls % 3 :: 3] = -torch.inf
        return logits


FAST = {
    "greedy": _GREEDY,
    "mild": _MILD,
    "hot": _HOT,
    "stop token": replace(_HOT, stop_token_ids=list(range(3, VOCAB, 16))),
    "stop string": replace(_MILD, stop=_LETTERS),
    "kept stop string": replace(_HOT, stop=_LETTERS, include_stop_str_in_output=True),
    "to the end": replace(_GREEDY, max_tokens=None, ignore_eos=True),
    "samples": replace(_HOT, n=3),
    "stopped samples": replace(_MILD, n=2, stop=_LETTERS, stop_token_ids=[7, 77, 177]),
}
"""Sampled on the device where the runner can."""
EVERYTHING = FAST | {
    "top-p": replace(_HOT, top_p=0.7),
    "top-k": replace(_MILD, top_k=20, min_p=0.02),
    "penalties": replace(_MILD, presence_penalty=1.0, frequency_penalty=1.5),
    "greedy penalties": replace(_GREEDY, repetition_penalty=1.8, frequency_penalty=1.0),
    "no repeats": replace(_GREEDY, no_repeat_ngram_size=1),
    "min tokens": replace(_HOT, min_tokens=7, stop_token_ids=list(range(3, VOCAB, 2))),
    "bias": replace(_HOT, logit_bias={9: 4.0, 19: -9.0}, bad_words=["a", "b"]),
    "logprobs": replace(_MILD, logprobs=3, prompt_logprobs=1),
    "processor": _MILD,
    "penalized samples": replace(_HOT, n=2, frequency_penalty=2.0, logprobs=1),
    "ranked": replace(_HOT, n=1, best_of=3, stop=_LETTERS),
    "beams": SamplingParams(temperature=0, use_beam_search=True, n=2, best_of=2),
}
"""Also sampling that needs more than a temperature and noise, or yields more than tokens."""


@dataclass(frozen=True, slots=True)
class Item:
    """A request that arrives after `arrives` steps; aborted when `aborts` tokens are visible."""

    name: str
    prompt: list[int]
    params: SamplingParams
    arrives: int
    aborts: int | None


@dataclass(frozen=True, slots=True)
class Served:
    """What a user sees of each request in the end, aborted or not.

    Attributes:
        counts: "most_running", sequences at once; "aborted"; "stops_inside", sequences that a stop
            ended in a step which gave them several tokens.
    """

    last: dict[str, RequestOutput]
    counts: Counter[str]


def make_traffic(seed: int, batch: int, kinds: dict[str, SamplingParams]) -> list[Item]:
    """More requests than run at once, of all kinds in turn; prompts share beginnings."""
    rng = np.random.default_rng(seed)
    stems = rng.integers(3, VOCAB, (3, 40)).tolist()
    fitting = [name for name, params in kinds.items() if params.width <= batch]
    items = []
    for number in range(max(len(fitting), batch + batch // 4 + 4)):
        kind = fitting[number % len(fitting)]
        params = replace(kinds[kind], seed=int(rng.integers(1 << 62)))
        if params.max_tokens is not None or number >= len(fitting):
            params = replace(params, max_tokens=int(rng.integers(8, LONGEST[batch])))
        if kind == "processor":
            params = replace(params, logits_processors=[Nth()])
        own = rng.integers(3, VOCAB, int(rng.integers(1, 9))).tolist()
        prompt = stems[number % 3][: int(rng.integers(0, 40))] + own
        arrives = 0 if number < batch else int(rng.integers(9))
        may_abort = params.width == 1 and number % 4 == 1
        aborts = int(rng.integers(2, 15)) if may_abort else None
        items.append(Item(f"{number}: {kind}", prompt, params, arrives, aborts))
    return items


def make_model(folder: Path, family: str = "llama", variant: str = "gqa") -> Path:
    """A random model whose output depends on all of its context."""
    make_tiny_checkpoint(folder, family, variant, with_tokenizer=True)
    return rewrite_config(folder, max_position_embeddings=MAX_LEN)


def make_draft(target: Path, folder: Path) -> Path:
    """The target with some noise on its weights: as a draft model it is often right."""
    folder.mkdir()
    for file in target.iterdir():
        (folder / file.name).write_bytes(file.read_bytes())
    weights = load_file(folder / "model.safetensors")
    noise = torch.Generator().manual_seed(0)
    noisy = {
        name: value + 0.1 * value.std() * torch.randn(value.shape, generator=noise)
        for name, value in weights.items()
    }
    save_file(noisy, folder / "model.safetensors", {"format": "pt"})
    return folder


def build(folder: Path, batch: int, drafter: Drafter | None, **engine_args: Any) -> Engine:
    """An engine that runs `batch` sequences at once, with KV blocks for fewer."""
    given = {
        "model": str(folder),
        "device": "cpu",
        "dtype": "float32",
        "block_size": 8,
        "max_model_len": MAX_LEN,
        "max_num_seqs": batch,
        "max_num_batched_tokens": STEP_TOKENS[batch],
        "num_gpu_blocks_override": BLOCKS[batch],
        "cpu_threads": 1,
        "disable_log_stats": True,
    }
    config = EngineConfig.from_args(resolve_engine_args(given | engine_args))
    return build_engine(config, show_progress=False, drafter=drafter).engine


def serve(engine: Engine, items: list[Item], *, aborting: bool = True) -> Served:
    """Runs the requests to their ends."""
    waiting = deque(sorted(items, key=lambda item: item.arrives))
    aborts = {item.name: item.aborts for item in items if aborting and item.aborts}
    last: dict[str, RequestOutput] = {}
    shown: dict[tuple[str, int], int] = {}
    counts: Counter[str] = Counter()
    for now in range(3000):
        while waiting and (waiting[0].arrives <= now or not engine.has_unfinished):
            item = waiting.popleft()
            prompt = Prompt(None, item.prompt)
            engine.add_request(engine.make_request(item.name, prompt, item.params))
        if not engine.has_unfinished:
            break
        outputs = engine.step()
        running = int(engine.metrics()["num_requests_running"])
        counts["most_running"] = max(counts["most_running"], running)
        for output in outputs:
            name = output.request_id
            assert output.error is None, output.error
            for one in output.outputs:
                new = len(one.token_ids) - shown.get((name, one.index), 0)
                shown[name, one.index] = len(one.token_ids)
                counts["stops_inside"] += new > 1 and one.finish_reason == "stop"
            if output.finished:
                last[name] = output
            elif len(output.outputs[0].token_ids) >= aborts.get(name, MAX_LEN):
                aborted = engine.abort(name)
                assert aborted is not None
                last[name] = aborted
                counts["aborted"] += 1
    else:
        raise AssertionError("no end in sight")
    assert len(last) == len(items)
    return Served(last, counts)


def differing(expected: Served, served: Served) -> list[str]:
    """Requests that came out otherwise; of aborted ones the tokens have to be the first ones."""
    assert expected.last.keys() == served.last.keys()
    return [name for name, last in served.last.items() if not _agree(last, expected.last[name])]


def _agree(ours: RequestOutput, theirs: RequestOutput) -> bool:
    if ours.outputs[0].finish_reason == "abort":
        (mine,), (other,) = ours.outputs, theirs.outputs
        return mine.token_ids == other.token_ids[: len(mine.token_ids)]
    return (
        len(ours.outputs) == len(theirs.outputs)
        and all(map(_same, ours.outputs, theirs.outputs))
        and _close(ours.prompt_logprobs, theirs.prompt_logprobs)
    )


def _same(ours: CompletionOutput, theirs: CompletionOutput) -> bool:
    """Whether they are equal but for rounding in log-probabilities."""
    mine, other = (replace(o, logprobs=None, cumulative_logprob=None) for o in (ours, theirs))
    sums = [o.cumulative_logprob or 0.0 for o in (ours, theirs)]
    return (
        mine == other and abs(sums[0] - sums[1]) < 1e-3 and _close(ours.logprobs, theirs.logprobs)
    )


def _close(
    ours: Iterable[TokenLogprobs | None] | None, theirs: Iterable[TokenLogprobs | None] | None
) -> bool:
    if ours is None or theirs is None:
        return ours is theirs
    pairs = [(mine or {}, other or {}) for mine, other in zip(ours, theirs, strict=True)]
    return all(
        mine.keys() == other.keys()
        and all(abs(mine[t].logprob - other[t].logprob) < 1e-4 for t in other)
        for mine, other in pairs
    )


def without_ends(item: Item) -> Item:
    """The same sampling, ended by the length alone."""
    params = replace(item.params, stop=None, stop_token_ids=None, min_tokens=0, ignore_eos=True)
    return replace(item, params=params)


class Bench:
    """Serves one traffic by one engine with any drafter, after a run without drafts.

    Args:
        ranks: arguments of the engine with drafts alone; there is one with ranks at a time.

    Attributes:
        plain: outputs of an engine without a drafter, no request aborted.
        record: the same if only the length ended sequences.
    """

    def __init__(
        self,
        folder: Path,
        batch: int,
        kinds: dict[str, SamplingParams],
        *,
        seed: int = 0,
        ranks: Mapping[str, Any] = MappingProxyType({}),
        **engine_args: Any,
    ) -> None:
        self.batch = batch
        self._kinds = kinds
        self._seed = seed
        engine = build(folder, batch, None, **engine_args)
        self.plain = serve(engine, self._traffic(), aborting=False)
        endless = serve(engine, list(map(without_ends, self._traffic())), aborting=False)
        self.record: Record = {
            (name, completion.index): list(completion.token_ids)
            for name, last in endless.last.items()
            for completion in last.outputs
        }
        self.switch = Switch()
        self.engine = build(folder, batch, self.switch, **engine_args, **ranks)

    def serve(self, drafter: Drafter | None) -> tuple[list[str], Counter[str]]:
        """Requests that differ, and all that was counted meanwhile."""
        self.switch.drafter = drafter
        before = self.engine.metrics()
        served = serve(self.engine, self._traffic())
        counts = Counter(served.counts)
        for name, value in self.engine.metrics().items():
            counts[name.removeprefix("spec_decode_")] += int(value - before.get(name, 0))
        return differing(self.plain, served), counts

    def forget(self) -> None:
        """What earlier runs left in the prefix cache and in the switch's figures."""
        self.engine.reset_prefix_cache()
        self.switch.reset()

    def _traffic(self) -> list[Item]:
        return make_traffic(self._seed, self.batch, self._kinds)  # processors' states are new
