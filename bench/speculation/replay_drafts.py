"""What drafts of the lookahead cache are worth, without running a model.

A target's outputs are recorded once (greedy, float32). Then each arm drafts along them in batches,
with the calls an engine would make: the tree verification accepts what the recorded output says, so
a step takes no longer than its proposal, and thousands of drafter settings can be compared in a
minute. Every batch begins with a cold cache, or (`--warm`) with one that holds other files' text.

Prompts fall into two halves by their package: settings are to be tuned on "a" and reported on "b".
`--nodes` caps the nodes of a draft; without it the drafter's own defaults do. "vs ngram" compares
tokens per step with prompt lookup's (2 to 5 tokens matched, 7 drafted). Unless `--costs` gives the
duration of steps, nodes cost nothing and the budget keeps all. With it "speed-up" is that of whole
batches over steps without drafts, and "first half" that until half of the tokens are there: a batch
ends with its slowest sequence.
"""

from __future__ import annotations

import argparse
import dataclasses
import time
from pathlib import Path
from typing import Any

import numpy as np

from bench.common import RESULTS, bench_parser, print_table, settings_of, write_results
from bench.generation import greedy
from bench.speculation.arms import repeats
from hetero_llm import LLM
from hetero_llm.config.lookahead_config import LookaheadConfig
from hetero_llm.core.draft_tree import MAX_NODES
from hetero_llm.core.drafter import Drafter, StepReport
from hetero_llm.core.outputs import RequestMetrics
from hetero_llm.core.request import Request, Sequence
from hetero_llm.core.sampling_params import SamplingParams
from hetero_llm.demo_models import heldout_prompts
from hetero_llm.gpu.graph_set import token_buckets
from hetero_llm.spec_decode.hybrid_drafter import HybridDrafter
from hetero_llm.spec_decode.ngram.drafter import PromptLookupDrafter

END_ID, VOCAB = 0, 4096
WIDTH = 2048
CAPACITY = 1 << 20
ARMS: dict[str, dict[str, Any] | None] = {
    "ngram": None,
    "raw": {"cache_mode": 0, "token_paths_top_k": 1},
    "raw, no back-off": {"cache_mode": 0, "is_hybrid": False},
    "turbo": {"cache_mode": 1},
    "turbo from 1": {"cache_mode": 1, "min_match_length": 1},
    "hybrid": {"cache_mode": 2},
    "merged": {"cache_mode": 3},
}


def record(path: Path, prompts: np.ndarray, tokens: int) -> np.ndarray:
    """[N, tokens] outputs of the demo target behind `prompts`, [N, length]; from `path` if they
    were recorded there before."""
    if not path.exists():
        print(f"recording {path}")
        width = prompts.shape[1] + tokens + 16
        with LLM(
            "demo", device="cpu", dtype="float32", max_model_len=width, max_num_seqs=32
        ) as llm:
            outputs = llm.generate(
                prompt_token_ids=prompts.tolist(), sampling_params=greedy(tokens), use_tqdm=False
            )
        path.parent.mkdir(parents=True, exist_ok=True)
        np.savez_compressed(path, outputs=[o.outputs[0].token_ids for o in outputs])
    with np.load(path) as data:
        return data["outputs"].astype(np.int64)


def halves() -> dict[str, np.ndarray]:
    """Rows of the held-out prompts, by package, in an order without meaning."""
    names, of_row = np.unique(heldout_prompts().packages, return_inverse=True)
    order = np.random.default_rng(0).permutation(len(of_row))
    in_a = np.random.default_rng(1).permutation(len(names))[: len(names) // 2]
    mask = np.isin(of_row[order], in_a)
    return {"a": order[mask], "b": order[~mask]}


def sequence_of(name: str, prompt: list[int], tokens: int, *, nodes: int | None = None) -> Sequence:
    """A sequence of a request for `tokens` tokens. nodes: the request's num_speculative_tokens."""
    params = SamplingParams(max_tokens=tokens, num_speculative_tokens=nodes)
    request = Request(
        request_id=name, prompt=None, prompt_token_ids=prompt, params=params, seed=0,
        end_ids=frozenset(), eos_ids=frozenset(), max_total_tokens=len(prompt) + tokens,
        root_hash=b"replay", metrics=RequestMetrics(arrival_time=0.0),
    )  # fmt: skip
    sequence = Sequence(request, 0, list(prompt), len(prompt))
    request.sequences.append(sequence)
    return sequence


class Clock:
    """What steps cost: milliseconds by rows, of the largest size that a graph is captured for.

    Args:
        times: (rows, milliseconds), ascending; between them a straight line.
        gap: milliseconds that the device waits between steps with drafts.
    """

    def __init__(self, times: list[tuple[int, float]], gap: float) -> None:
        self._rows, self._times = zip(*times, strict=True)
        self.gap = gap * 1e-3
        self.now = 1.0

    def seconds(self, rows: int) -> float:
        bucket = next((b for b in token_buckets(self._rows[-1]) if b >= rows), rows)
        most = max(bucket / self._rows[-1], 1.0)  # beyond all graphs
        return float(np.interp(bucket, self._rows, self._times)) * most * 1e-3

    def profile(self) -> list[tuple[int, float]]:
        return [(rows, self.seconds(rows)) for rows in token_buckets(self._rows[-1])]


def drafter_of(settings: dict[str, Any] | None, clock: Clock | None) -> Drafter:
    if settings is None:
        return PromptLookupDrafter(width=WIDTH, smallest=2, largest=5, num_tokens=7)
    config = LookaheadConfig(eos_token_id=(END_ID,), max_seq_len=WIDTH, voc_size=VOCAB)
    config = dataclasses.replace(config, num_threads=1, **settings)
    if clock is None:
        return HybridDrafter(config, width=WIDTH, capacity=CAPACITY)
    drafter = HybridDrafter(config, width=WIDTH, capacity=CAPACITY)
    drafter.set_step_times(clock.profile())
    return drafter


def accepted_depth(tokens: list[int], parents: list[int], truth: list[int]) -> int:
    """How many of the true tokens the draft has on a path from its root."""
    node = -1
    for depth, token in enumerate(truth):
        child = next(
            (i for i in range(len(tokens)) if parents[i] == node and tokens[i] == token), None
        )
        if child is None:
            return depth
        node = child
    return len(truth)


def replay(
    drafter: Drafter,
    prompts: list[list[int]],
    outputs: list[list[int]],
    nodes: int | None,
    clock: Clock | None,
) -> dict[str, float]:
    """One batch from the first token on; sums of steps, tokens and nodes."""
    unfinished = []
    for index, (prompt, output) in enumerate(zip(prompts, outputs, strict=True)):
        sequence = sequence_of(f"{index}", prompt, len(output), nodes=nodes)
        sequence.token_ids.append(output[0])
        unfinished.append((sequence, output))
    keys = "steps", "tokens", "drafted", "accepted", "hits", "seconds", "run", "plain", "half"
    sums = dict.fromkeys(keys, 0.0)
    if clock is not None:
        sums["plain"] = clock.seconds(len(unfinished)) * (len(outputs[0]) - 1)
    while unfinished:
        sequences = [sequence for sequence, _ in unfinished]
        limits = [
            min(s.request.max_total_tokens - len(s.token_ids) - 1, MAX_NODES) for s in sequences
        ]
        asked = [i for i, limit in enumerate(limits) if limit > 0 and not drafter.idle]
        begin = time.perf_counter()
        drafts = drafter.propose(
            [sequences[i] for i in asked], [limits[i] for i in asked], len(sequences)
        ) if asked else None  # fmt: skip
        drafter.run_deferred()
        sums["seconds"] += time.perf_counter() - begin
        if clock is not None:
            rows = len(sequences) + (int(drafts.counts.sum()) if drafts else 0)
            clock.now += clock.seconds(rows)
            asks, idle = drafts is not None, clock.gap if drafts else 0.0
            drafter.observe_step(StepReport(len(sequences), rows, clock.seconds(rows), idle, asks))
            clock.now += idle
            sums["run"] += clock.seconds(rows) + (clock.gap if drafts else 0.0)
            if sums["tokens"] < len(prompts) * (len(outputs[0]) - 1) / 2:
                sums["half"] = sums["run"]
        ends = dict(zip(asked, np.cumsum(drafts.counts).tolist(), strict=True)) if drafts else {}
        first = 0
        for index, (sequence, output) in enumerate(unfinished):
            done = len(sequence.token_ids) - sequence.num_prompt_tokens
            accepted = 0
            if index in ends and drafts is not None:
                part = slice(first, ends[index])
                first = ends[index]
                row = drafts.token_ids[part].tolist(), drafts.parents[part].tolist()
                accepted = accepted_depth(*row, output[done:-1])
                sums["drafted"] += len(row[0])
            sequence.token_ids += output[done : done + accepted + 1]
            sums["steps"] += 1
            sums["tokens"] += accepted + 1
            sums["accepted"] += accepted
            sums["hits"] += accepted > 0
        for sequence, output in unfinished:
            if len(sequence.token_ids) - sequence.num_prompt_tokens == len(output):
                drafter.close(sequence.request)
        unfinished = [
            (sequence, output)
            for sequence, output in unfinished
            if len(sequence.token_ids) - sequence.num_prompt_tokens < len(output)
        ]
    drafter.run_deferred()
    return sums


def warm(drafter: Drafter, prompts: list[list[int]], outputs: list[list[int]]) -> None:
    """Lets the drafter learn other requests' outputs, whole ones, in the order given."""
    for index, (prompt, output) in enumerate(zip(prompts, outputs, strict=True)):
        sequence = sequence_of(f"warm-{index}", prompt, len(output))
        drafter.propose([sequence], [1], 1)
        sequence.token_ids += output
        drafter.close(sequence.request)
        drafter.run_deferred()


def measure(
    settings: dict[str, Any] | None,
    texts: tuple[np.ndarray, np.ndarray],
    rows: np.ndarray,
    batch: int,
    nodes: int | None,
    others: np.ndarray | None,
    clock: Clock | None,
) -> dict[str, float]:
    """All rows in batches, each with a new drafter."""
    prompts, outputs = texts
    total: dict[str, float] = {}
    for first in range(0, len(rows) - batch + 1, batch):
        chosen = rows[first : first + batch]
        drafter = drafter_of(settings, clock)
        if others is not None:
            warm(drafter, prompts[others].tolist(), outputs[others].tolist())
        sums = replay(drafter, prompts[chosen].tolist(), outputs[chosen].tolist(), nodes, clock)
        total = {key: total.get(key, 0.0) + value for key, value in sums.items()}
    figures = {}
    if clock is not None:
        figures["speed-up"] = total["plain"] / total["run"]
        figures["first half"] = total["plain"] / 2 / total["half"]
    return figures | {
        "tokens/step": total["tokens"] / total["steps"],
        "drafted/step": total["drafted"] / total["steps"],
        "hit_rate": total["hits"] / total["steps"],
        "hit_len": total["accepted"] / total["steps"],
        "us/sequence": total["seconds"] / total["steps"] * 1e6,
    }


def parse() -> argparse.Namespace:
    parser = bench_parser(__doc__)
    parser.add_argument("--arms", nargs="+", choices=list(ARMS), default=list(ARMS))
    parser.add_argument("--half", choices=["a", "b"], default="b")
    parser.add_argument("--batches", nargs="+", type=int, default=[1, 16, 32])
    parser.add_argument("--nodes", type=int, help="most nodes of a draft")
    parser.add_argument("--prompt", type=int, default=768, help="tokens of a prompt")
    parser.add_argument("--tokens", type=int, default=257, help="of an output")
    parser.add_argument("--warm", action="store_true", help="the other half is known before")
    parser.add_argument("--calm", action="store_true", help="no outputs that repeat 32 tokens")
    parser.add_argument(
        "--costs", nargs="+", metavar="ROWS:MS",
        help="what steps take, for the budget and the columns of speed; else nodes cost nothing",
    )  # fmt: skip
    parser.add_argument("--gap", type=float, default=0.15, help="ms between steps with drafts")
    parser.add_argument("--record", type=Path, help="where the outputs are kept")
    return parser.parse_args()


def main() -> None:
    args = parse()
    path = args.record or RESULTS.parents[1] / "build" / f"replay-{args.prompt}-{args.tokens}.npz"
    prompts = heldout_prompts().prompts[:, -args.prompt :].astype(np.int64)
    texts = prompts, record(path, prompts, args.tokens)
    rows = halves()
    if args.calm:
        outputs = texts[1].tolist()
        rows = {
            half: np.array([row for row in chosen if not repeats(outputs[row])])
            for half, chosen in rows.items()
        }
    clock = None
    if args.costs:
        pairs = [pair.split(":") for pair in args.costs]
        clock = Clock([(int(size), float(ms)) for size, ms in pairs], args.gap)
    others = rows["b" if args.half == "a" else "a"] if args.warm else None
    table = []
    for batch in args.batches:
        rates: dict[str, float] = {}
        for name in args.arms:
            figures = measure(ARMS[name], texts, rows[args.half], batch, args.nodes, others, clock)
            rates[name] = figures["tokens/step"]
            over = rates[name] / rates["ngram"] if "ngram" in rates else float("nan")
            table.append({"batch": batch, "drafts": name, **figures, "vs ngram": over})
    print_table(table)
    settings = settings_of(args, "half nodes prompt tokens warm calm costs gap")
    if args.out:
        write_results("replay_drafts", {**settings, "rows": table}, args.out)


if __name__ == "__main__":
    main()
