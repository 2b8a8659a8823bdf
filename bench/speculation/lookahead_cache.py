"""What the lookahead cache costs on this CPU: lookups of a batch, learning, a whole proposal.

The history holds a million tokens of source code and every sequence a prompt of its own. A lookup
asks for one sequence's drafts in its own text and in the history (local + global); threads share
batches. "propose" is all that stands between two verify steps but the engine's own bookkeeping:
taking in tokens, judging the last drafts, looking up, the budget. Medians of many calls, on text
that grows from call to call as an engine's does.
"""

from __future__ import annotations

import argparse
import dataclasses
import time
from typing import Any

import numpy as np

from bench.common import bench_parser, report
from bench.speculation.replay_drafts import ARMS, END_ID, VOCAB, sequence_of
from hetero_llm.config.lookahead_config import LookaheadConfig
from hetero_llm.core.request import Sequence
from hetero_llm.demo_models import heldout_prompts
from hetero_llm.spec_decode.hybrid_drafter import HybridDrafter
from hetero_llm.spec_decode.lookahead.sequence_state import NAMESPACE

PROMPT, NEW = 512, 3
WIDTH = 2048


def source_code() -> np.ndarray:
    """[rows, 1324] prompts and what follows them."""
    held = heldout_prompts()
    return np.concatenate([held.prompts, held.continuations], axis=1).astype(np.int64)


def fill(drafter: HybridDrafter, count: int, seed: int) -> None:
    """Enters `count` tokens of documents: shuffled spans of the held-out text, so that most of it
    recurs somewhere and much of it does not."""
    text, rng = source_code(), np.random.default_rng(seed)
    space = int(drafter.states.arrays.numbers[0, NAMESPACE])  # that of the running sequences
    held = 0
    while held < count:
        spans = []
        for _ in range(16):
            row, size = rng.integers(len(text)), int(rng.integers(4, 60))
            begin = rng.integers(text.shape[1] - size)
            spans.append(text[row, begin : begin + size])
        document = np.concatenate(spans).astype(np.int32)
        drafter.global_cache.add(document, 0, space, 0)
        held += len(document)


def median_us(times: list[float]) -> float:
    return float(np.median(times)) * 1e6


def measure(settings: dict[str, Any], batch: int, args: argparse.Namespace) -> dict[str, float]:
    config = LookaheadConfig(eos_token_id=(END_ID,), max_seq_len=WIDTH, voc_size=VOCAB)
    config = dataclasses.replace(config, num_threads=args.threads, **settings)
    drafter = HybridDrafter(config, width=WIDTH, capacity=4 * args.tokens)
    text = source_code()[:batch]
    sequences: list[Sequence] = [
        sequence_of(str(i), row[:PROMPT].tolist(), 800) for i, row in enumerate(text)
    ]
    limits = [60] * batch
    drafter.propose(sequences, limits, batch)
    drafter.run_deferred()
    fill(drafter, args.tokens, seed=0)
    looked: list[float] = []
    proposed: list[float] = []
    learned: list[float] = []
    for step in range(args.steps):
        for sequence, row in zip(sequences, text, strict=True):
            done = PROMPT + step * NEW
            sequence.token_ids += row[done : done + NEW].tolist()
        begin = time.perf_counter()
        drafter.propose(sequences, limits, batch)
        proposed.append(time.perf_counter() - begin)
        begin = time.perf_counter()
        drafter._step.look_up(batch)
        looked.append(time.perf_counter() - begin)
        begin = time.perf_counter()
        drafter.run_deferred()
        learned.append(time.perf_counter() - begin)
    return {
        "lookup us": median_us(looked),
        "propose us": median_us(proposed),
        "learn us/token": median_us(learned) / (batch * NEW),
    }


def main() -> None:
    parser = bench_parser(__doc__)
    arms = [name for name in ARMS if name in ("raw", "turbo", "hybrid", "merged")]
    parser.add_argument("--arms", nargs="+", choices=arms, default=arms)
    parser.add_argument("--batches", nargs="+", type=int, default=[1, 8, 64])
    parser.add_argument("--threads", type=int, default=8, help="at most as many as there are cores")
    parser.add_argument("--tokens", type=int, default=1_000_000, help="of the history")
    parser.add_argument("--steps", type=int, default=200)
    args = parser.parse_args()
    table = []
    for name in args.arms:
        for batch in args.batches:
            figures = measure(ARMS[name] or {}, batch, args)
            table.append({"cache": name, "batch": batch, "threads": args.threads, **figures})
    about = {"tokens": args.tokens, "prompt": PROMPT, "new": NEW}
    report("lookahead_cache", about, table, args.out)


if __name__ == "__main__":
    main()
