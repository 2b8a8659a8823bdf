"""Speculation against our own run without, on held-out text, greedy unless a temperature is given.

One engine serves all arms in turn; each run has a new drafter, which has seen no prompt of the run
and nothing that followed one. "warm": the hybrid cache holds other held-out text, of files that no
prompt is from. What a drafter keeps from one run to the next are the times of steps, as in an
engine that has served for a while.

"draft" arms need --draft: the draft model's worker on the CPU, alone or beside the cache. One
worker serves all of them; every request is sent to it anew. "gpu draft" needs --gpu-draft, too: the
engine is then built with the same draft model beside the target, on its device, whatever the arm.

Batches of less than 8 run several times, each time with other prompts.

"tok/s": tokens behind the first one over the time they take, T(N + 1 tokens) - T(1 token), prompts
computed anew each time; the median of the repeats, in which arms alternate. A batch ends with its
slowest sequence, so "first half" has the rate until half of the tokens are there, over the same of
the run without drafts. "no loops" leaves out prompts whose plain output repeats a span of 32
tokens, which any such drafter finds; "random" has prompts of random tokens, where there is nothing
to find. "same": share of requests whose tokens are those of the plain run; in bfloat16 a verify
step's sums may differ from a decode step's in the last bits.

`--adapter`: all requests have a LoRA adapter of rank 16 in all linear layers, so small that the
text is nearly the base model's: drafts are as good, and what differs is what steps cost.
"""

from __future__ import annotations

import argparse
import logging
from statistics import median

import numpy as np

from bench.common import Rows, bench_parser, print_table, settings_of, write_results
from bench.made_adapters import MadeAdapters, adapters_of
from bench.speculation.arms import ARMS, VOCAB, Bench, add_arguments, batches_of, repeats
from hetero_llm.core.step_times import StepTimes
from hetero_llm.spec_decode.proposal_account import ProposalAccount

RANK = 16  # of the adapter


def random_batch(size: int, length: int) -> list[list[int]]:
    return np.random.default_rng(1).integers(3, VOCAB, (size, length)).tolist()


def measure(bench: Bench, args: argparse.Namespace) -> Rows:
    works = {
        str(size): batches
        for size, batches in zip(args.batches, batches_of(args.batches, args.prompt), strict=True)
    }
    works["random"] = [random_batch(args.random, args.prompt)]
    for arm in args.arms:  # compiles what is compiled at first use, and learns times of steps
        bench.run(arm, [[[5 + i % 90 for i in range(64)]] * 2])
    table: Rows = []
    largest, is_calm = str(max(args.batches)), [False]
    for work in [*works, "no loops"]:
        if work == "no loops":
            (batch,) = works[largest][-1:]
            calm = [p for p, c in zip(batch, is_calm[-len(batch) :], strict=True) if c]
            if not calm:
                print("no output is without loops")
                continue
            works[work] = [calm]
        runs: dict[str, list[dict[str, float]]] = {arm: [] for arm in args.arms}
        plain: list[list[int]] = []
        for _ in range(args.repeats):
            for arm in args.arms:
                outputs, figures = bench.run(arm, works[work])
                if arm == "none":
                    plain = outputs
                same = np.mean([a == b for a, b in zip(outputs, plain, strict=True)])
                runs[arm].append({**figures, "same": float(same)})
        if work == largest:
            is_calm = [not repeats(tokens) for tokens in plain]
        table += rows_of(work, len(works[work][-1]), runs)
    return table


def rows_of(work: str, size: int, runs: dict[str, list[dict[str, float]]]) -> Rows:
    """Rows of the table: medians of each arm's runs."""
    rows: Rows = []
    middle = {
        arm: {name: median(run[name] for run in of_arm) for name in of_arm[0]}
        for arm, of_arm in runs.items()
    }
    for arm, figures in middle.items():
        over = {
            "over none": figures["tok/s"] / middle["none"]["tok/s"],
            "first half": figures["half tok/s"] / middle["none"]["half tok/s"],
        }
        rows.append({"work": work, "batch": size, "drafts": arm, **over, **figures})
    print_table(rows)
    return rows


def main() -> None:
    parser = bench_parser(__doc__)
    add_arguments(parser)
    parser.set_defaults(device="cpu", prompt=768)
    parser.add_argument("--model", default="demo", help="the demo target or a scale-up of it")
    parser.add_argument("--arms", nargs="+", choices=list(ARMS), default=list(ARMS)[:7])
    parser.add_argument("--temperature", type=float, default=0.0)
    parser.add_argument("--random", type=int, default=4, help="random prompts")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument(
        "--gpu-draft", action="store_true", help="have --draft on the device of --model, too"
    )
    parser.add_argument("--adapter", action="store_true", help="all requests have a LoRA adapter")
    parser.add_argument(
        "--no-budget", action="store_true",
        help="verify all that is proposed, whatever it costs: for tokens per step, not for speed",
    )  # fmt: skip
    args = parser.parse_args()
    if args.no_budget:
        StepTimes.observe = lambda *_: None  # type: ignore[method-assign]
        ProposalAccount.set_step_times = lambda *_: None  # type: ignore[method-assign]
    if args.arms[0] != "none":
        parser.error("the first arm is the baseline: none")
    if args.gpu_draft and args.draft is None:
        parser.error("--gpu-draft needs --draft")
    if len(set(args.batches)) < len(args.batches):
        parser.error("batches of one size would be one row")
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    lora = {"enable_lora": True, "max_lora_rank": RANK, "max_loras": 1} if args.adapter else {}
    with MadeAdapters(1, RANK, args.device, b_size=1e-6).in_place():
        bench = Bench(args, gpu_draft=args.gpu_draft, engine_args=lora)
        if args.adapter:
            bench.set_adapter(*adapters_of(1))
        profile = bench.profile_ms
        print("profile, rows and ms:", *(f"{rows}:{ms}" for rows, ms in profile))
        table = measure(bench, args)
        bench.close()
    settings = settings_of(args, "model device dtype temperature prompt tokens repeats adapter")
    settings |= settings_of(args, "draft draft_tokens overlap")
    settings |= {"budget": not args.no_budget, "profile_ms": profile}
    write_results(f"speculation.{args.device}", {**settings, "rows": table}, args.out)


if __name__ == "__main__":
    main()
