"""Training-free speculation through `LLM.generate` against our own run without, on held-out text.

Every arm is a fresh engine with a cold cache; every batch has prompts of its own, so no row has
seen the prompts or the continuations of another. Greedy. Rates are tokens behind the first one over
the time they take: T(N + 1 tokens) - T(1 token), prompts computed anew each time. The row "no
loops" leaves out prompts whose plain output repeats a span of 32 tokens, which any such drafter
finds. "same": share of requests whose tokens are those of the plain run; in bfloat16 a verify
step's sums may differ from a decode step's in the last bits. "random": prompts of random tokens,
where there is nothing to find.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from typing import Any

import numpy as np

from bench.common import print_table, write_results
from hetero_llm import LLM, SamplingParams
from hetero_llm.cpu.lookahead.budget import StepCosts
from hetero_llm.demo_models import heldout_prompts

ARMS: dict[str, dict[str, Any] | None] = {
    "none": None,
    "ngram": {"method": "ngram", "num_speculative_tokens": 7, "prompt_lookup_min": 2,
              "prompt_lookup_max": 5},
    "raw": {"method": "lookahead", "cache_mode": 0},
    "turbo": {"method": "lookahead", "cache_mode": 1, "token_paths_top_k": 2},
    "hybrid": {"method": "lookahead", "cache_mode": 2, "token_paths_top_k": 2},
}  # fmt: skip
SPAN = 32
FIGURES = ("spec_decode_num_draft_tokens", "spec_decode_num_accepted_tokens", "num_steps")


def batches_of(sizes: list[int], length: int) -> list[list[list[int]]]:
    """Distinct held-out prompts for every batch, their last `length` tokens."""
    prompts = heldout_prompts().prompts
    assert sum(sizes) <= len(prompts), "not enough held-out prompts"
    chosen = np.random.default_rng(0).permutation(len(prompts))[: sum(sizes)]
    rows = iter(prompts[chosen, -length:].tolist())
    return [[next(rows) for _ in range(size)] for size in sizes]


def random_batch(size: int, length: int, vocab: int) -> list[list[int]]:
    return np.random.default_rng(1).integers(3, vocab, (size, length)).tolist()


def repeats(tokens: list[int]) -> bool:
    """Whether a span of `SPAN` tokens occurs twice."""
    spans = [tuple(tokens[i : i + SPAN]) for i in range(len(tokens) - SPAN + 1)]
    return len(set(spans)) < len(spans)


class Arm:
    """One engine, and what its runs yield."""

    def __init__(self, llm: LLM, tokens: int) -> None:
        self._llm = llm
        self._tokens = tokens

    def warm_up(self) -> None:
        """Compiles what is compiled at first use, on tokens that no prompt has much of."""
        self._generate([[5 + i % 90 for i in range(64)]], 20)

    def run(self, prompts: list[list[int]]) -> tuple[list[list[int]], dict[str, float]]:
        """The tokens of each prompt, and rate, tokens a step and drafts of the run."""
        _, first = self._generate(prompts, 1)
        before = self._llm.get_metrics()
        outputs, seconds = self._generate(prompts, self._tokens + 1)
        after = self._llm.get_metrics()
        drafted, accepted, steps = (after[name] - before[name] for name in FIGURES)
        generated = len(prompts) * self._tokens
        return outputs, {
            "tok/s": generated / (seconds - first),
            "tokens/step": generated / max(generated - accepted, 1),
            "drafted/token": drafted / generated,
            "accepted of drafted": accepted / max(drafted, 1),
            "steps": steps,
        }

    def _generate(self, prompts: list[list[int]], count: int) -> tuple[list[list[int]], float]:
        params = SamplingParams(temperature=0, max_tokens=count, ignore_eos=True, detokenize=False)
        begin = time.perf_counter()
        outputs = self._llm.generate(
            prompt_token_ids=prompts, sampling_params=params, use_tqdm=False
        )
        seconds = time.perf_counter() - begin
        self._llm.reset_prefix_cache()
        return [o.outputs[0].token_ids for o in outputs], seconds


def measure(
    start: Callable[[dict[str, Any] | None], LLM], args: argparse.Namespace
) -> list[dict[str, Any]]:
    batches = batches_of(args.batches, args.prompt)
    works = {str(len(batch)): batch for batch in batches}
    plain: dict[str, list[list[int]]] = {}
    rates: dict[str, float] = {}
    table = []
    for name in args.arms:
        with start(ARMS[name]) as llm:
            arm = Arm(llm, args.tokens)
            arm.warm_up()
            if name == "none":
                vocab = 4096
                works["random"] = random_batch(args.random, args.prompt, vocab)
            for work, prompts in [*works.items()]:
                outputs, figures = arm.run(prompts)
                if name == "none":
                    plain[work], rates[work] = outputs, figures["tok/s"]
                same = np.mean([a == b for a, b in zip(outputs, plain[work], strict=True)])
                table.append(
                    {"drafts": name, "batch": work, **figures, "same": float(same),
                     "over none": figures["tok/s"] / rates[work]}
                )  # fmt: skip
                print({k: round(v, 3) if isinstance(v, float) else v for k, v in table[-1].items()},
                      flush=True)  # fmt: skip
        if name == "none":
            largest = str(max(args.batches))
            calm = [
                (prompt, tokens)
                for prompt, tokens in zip(works[largest], plain[largest], strict=True)
                if not repeats(tokens)
            ]
            print(f"{len(calm)} of {largest} outputs repeat no span of {SPAN} tokens")
    return table


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", default="demo", help="the demo target or a scale-up of it")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--batches", type=lambda s: [int(w) for w in s.split(",")], default=[1, 8])
    parser.add_argument("--arms", nargs="+", choices=list(ARMS), default=["none", "ngram", "raw"])
    parser.add_argument("--prompt", type=int, default=768, help="tokens of a prompt")
    parser.add_argument("--tokens", type=int, default=256, help="behind the first")
    parser.add_argument("--random", type=int, default=4, help="random prompts")
    parser.add_argument("--out", help="JSON file")
    parser.add_argument(
        "--no-budget", action="store_true",
        help="verify all that is proposed, whatever it costs: for tokens per step, not for speed",
    )  # fmt: skip
    args = parser.parse_args()
    if args.no_budget:
        StepCosts.observe = lambda *_: None  # type: ignore[method-assign]
    if args.arms[0] != "none":
        parser.error("the first arm is the baseline: none")

    def start(speculation: dict[str, Any] | None) -> LLM:
        return LLM(
            args.model, device=args.device, dtype=args.dtype, max_num_seqs=max(args.batches),
            max_model_len=args.prompt + args.tokens + 16, speculative_config=speculation,
        )  # fmt: skip

    table = measure(start, args)
    settings = {"model": args.model, "device": args.device, "dtype": args.dtype,
                "prompt": args.prompt, "tokens": args.tokens,
                "budget": not args.no_budget}  # fmt: skip
    write_results(f"speculation.{args.device}", {**settings, "rows": table}, args.out)
    print_table(table)


if __name__ == "__main__":
    main()
