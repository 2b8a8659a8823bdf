"""Drafts of chosen quality against our own run without, on text without loops: the gate.

    python tools/weaken_draft.py DIR
    python -m bench.speculation.never_slower --model TARGET --drafts DIR [--rates 0.2,0.8] ...

The demo draft agrees with its target more than most pairs do, and the demo target likes to repeat
itself. So drafts here are made weaker (`tools/weaken_draft.py`; --rates names those to run), and
prompts are those whose plain greedy output repeats no span of 32 tokens. One engine serves all; a
new drafter with a cold cache each run; runs without drafts alternate with the others.

"over none": tokens a second over those of the same repeat's run without drafts, medians of both;
tokens behind the first one over the time that they take. "first half": the same until half of the
tokens are there: a batch ends with its slowest sequence. "a1": share of proposals whose first token
was right. "wait": share of the time in which a step waited for the draft worker. "same": share of
requests whose tokens are those of the plain run; in bfloat16 a verify step may round near ties
differently.
"""

from __future__ import annotations

from pathlib import Path
from statistics import median

import numpy as np

from bench.common import Rows, bench_parser, print_table, settings_of, write_results
from bench.speculation.arms import ARMS, Bench, add_arguments, num_batches, repeats
from hetero_llm.demo_models import heldout_prompts

_CUT = 64  # tokens between two prompts that end in one file
_GOALS = {
    (0.2, 1): 0.98, (0.2, 8): 0.98, (0.2, 32): 0.98,
    (0.4, 1): 1.5, (0.4, 8): 1.2, (0.4, 32): 1.02,
    (0.6, 1): 2.0, (0.6, 8): 1.5, (0.6, 32): 1.1,
    (0.8, 1): 3.0, (0.8, 8): 2.0, (0.8, 32): 1.3,
}  # fmt: skip
"""Of a draft model alone, greedy, by agreement and batch; 0.98 elsewhere."""
_CACHE_GOALS = {1: 2.0, 8: 1.5, 32: 1.35, 128: 1.05}


def calm_prompts(bench: Bench, count: int, length: int, at_once: int) -> list[list[int]]:
    """`count` prompts of `length` tokens whose plain greedy output repeats no span.

    Args:
        at_once: prompts that are tried together.
    """
    held = heldout_prompts().prompts
    order = np.random.default_rng(0).permutation(len(held))
    calm: list[list[int]] = []
    for back in range(0, held.shape[1] - length + 1, _CUT):
        ends = held.shape[1] - back
        tried = held[order, ends - length : ends].tolist()
        for first in range(0, len(tried), at_once):
            prompts = tried[first : first + at_once]
            outputs, _ = bench.run("none", [prompts])
            pairs = zip(prompts, outputs, strict=True)
            calm += [prompt for prompt, output in pairs if not repeats(output)]
            if len(calm) >= count:
                return calm[:count]
    raise SystemExit(f"only {len(calm)} prompts without loops")


def measure(
    bench: Bench, arm: str, works: dict[int, list[list[list[int]]]], num_repeats: int
) -> Rows:
    """One row for each batch size: an arm beside the run without drafts."""
    rows = []
    warm = next(iter(works.values()))[0][:1]
    bench.run(arm, [warm])
    for size, batches in works.items():
        runs: dict[str, list[dict[str, float]]] = {"none": [], arm: []}
        same = []
        for _ in range(num_repeats):
            plain, figures = bench.run("none", batches)
            runs["none"].append(figures)
            outputs, figures = bench.run(arm, batches)
            waited = bench.drafter_metrics.get("draft_wait_seconds", 0.0)
            last = len(batches[-1]) * len(outputs[-1]) / figures["tok/s"]
            runs[arm].append({**figures, "wait": waited / last})
            same.append(np.mean([a == b for a, b in zip(outputs, plain, strict=True)]))
        middle = {
            name: {key: median(run[key] for run in of) for key in of[0]}
            for name, of in runs.items()
        }
        found = middle[arm]
        rows.append({
            "batch": size, "none": middle["none"]["tok/s"], "tok/s": found["tok/s"],
            "over none": found["tok/s"] / middle["none"]["tok/s"],
            "first half": found["half tok/s"] / middle["none"]["half tok/s"],
            "steps": found["steps"],
            "tokens/step": found["tokens/step"], "nodes/token": found["drafted/token"],
            "a1": found["a1"], "wait": found["wait"], "same": float(np.mean(same)),
        })  # fmt: skip
    return rows


def main() -> None:
    parser = bench_parser(__doc__)
    add_arguments(parser)
    parser.set_defaults(prompt=768, tokens=192, batches=[1, 8, 32, 128])
    parser.add_argument("--model", required=True, help="the demo target or a scale-up of it")
    parser.add_argument("--drafts", type=Path, required=True, help="of tools/weaken_draft.py")
    parser.add_argument("--rates", default="0.2,0.4,0.6,0.8")
    parser.add_argument("--overlaps", default="auto,enumerate")
    parser.add_argument("--temperatures", default="0")
    parser.add_argument("--cache-arms", default="hybrid", help="arms without a draft model")
    parser.add_argument("--repeats", type=int, default=2)
    args = parser.parse_args()
    rates = [float(word) for word in args.rates.split(",") if word]
    caches = [word for word in args.cache_arms.split(",") if word]
    assert all(arm in ARMS for arm in caches)
    bench = Bench(args)
    num = {size: min(num_batches(size), 4) for size in args.batches}
    needed = sum(size * count for size, count in num.items())
    prompts = iter(calm_prompts(bench, needed, args.prompt, max(args.batches)))
    works = {
        size: [[next(prompts) for _ in range(size)] for _ in range(count)]
        for size, count in num.items()
    }
    table: Rows = []
    settings = settings_of(args, "model device dtype prompt tokens repeats")
    settings["profile_ms"] = bench.profile_ms

    def note(name: str, temperature: float, goal: dict[int, float], arm: str) -> None:
        bench.set_temperature(temperature)
        rows = [
            {"drafts": name, "T": temperature, **row, "goal": goal.get(row["batch"], 0.98)}
            for row in measure(bench, arm, works, args.repeats)
        ]
        print_table(rows)
        table.extend(rows)  # written at once: what was measured is kept if the bench is stopped
        write_results("never_slower", {**settings, "rows": table}, args.out)

    for temperature in map(float, args.temperatures.split(",")):
        for arm in caches:
            note(arm, temperature, {} if temperature else _CACHE_GOALS, arm)
        for rate in rates:
            goal = {} if temperature else {s: g for (r, s), g in _GOALS.items() if r == rate}
            for overlap in args.overlaps.split(","):
                args.overlap = overlap
                bench.start_draft(args, args.drafts / f"draft-{rate:g}")
                note(f"draft {rate:g} {overlap}", temperature, goal, "draft")
    bench.close()


if __name__ == "__main__":
    main()
