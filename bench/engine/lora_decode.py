"""Decoding with LoRA adapters on a CPU: the demo target, native executor and torch.

    python -m bench.engine.lora_decode [--backends native,torch] [--batches 1,8] [--rank 16]

tokens/s = batch * STEPS / (T(1 + STEPS tokens) - T(1 token)) through `LLM.generate`, greedy. The
random adapters change all linear layers. All engines live in one process and all arms take turns;
the figures are the median and the best of the rounds. Arms:

- off: an engine without `enable_lora`.
- none: `enable_lora`, no request has an adapter.
- one: all requests have the same adapter.
- three: the requests have three adapters by turns.
"""

from __future__ import annotations

from contextlib import ExitStack
from statistics import median
from typing import Any

from bench.common import bench_parser, names_of, numbers, report
from bench.generation import greedy, seconds
from bench.made_adapters import MadeAdapters, adapters_of
from bench.shapes import Prompts
from hetero_llm import LLM

PROMPT, STEPS, VOCAB = 32, 64, 4096
BACKENDS = ("native", "torch")
ADAPTERS = {"off": 0, "none": 0, "one": 1, "three": 3}
"""Adapters in a step, by arm."""


def main() -> None:
    parser = bench_parser(__doc__)
    parser.add_argument("--backends", type=names_of(BACKENDS), default=list(BACKENDS))
    parser.add_argument("--batches", type=numbers, default=[1, 8])
    parser.add_argument("--rank", type=int, default=16)
    parser.add_argument("--rounds", type=int, default=15)
    args = parser.parse_args()
    requests, prompts = adapters_of(3), Prompts(VOCAB)
    rates: dict[tuple[str, int, str], list[float]] = {
        (backend, batch, arm): []
        for backend in args.backends
        for batch in args.batches
        for arm, count in ADAPTERS.items()
        if count <= batch
    }
    with ExitStack() as stack:
        stack.enter_context(MadeAdapters(3, args.rank, "cpu", b_size=0.02).in_place())

        def start(backend: str, **lora: Any) -> LLM:
            return stack.enter_context(LLM(
                "demo", device="cpu", cpu_backend=backend, max_num_seqs=max(args.batches),
                max_model_len=256, enable_prefix_caching=False, disable_log_stats=True, **lora,
            ))  # fmt: skip

        lora = {"enable_lora": True, "max_loras": 3, "max_lora_rank": args.rank}
        engines = {b: (start(b), start(b, **lora)) for b in args.backends}
        for turn in range(args.rounds + 1):  # the first one warms up
            # In another order each time: what ran before may still use cores.
            arms = list(rates)[turn % len(rates) :] + list(rates)[: turn % len(rates)]
            for backend, batch, arm in arms:
                count = ADAPTERS[arm]
                llm = engines[backend][arm != "off"]
                own = [requests[i % count] for i in range(batch)] if count else None
                long, short = (
                    seconds(llm, prompts.draw(batch, PROMPT), greedy(tokens), adapters=own)
                    for tokens in (1 + STEPS, 1)
                )
                if turn:
                    rates[backend, batch, arm].append(batch * STEPS / (long - short))
    rows = []
    for (backend, batch, arm), found in rates.items():
        off = rates[backend, batch, "off"]
        rows.append({
            "backend": backend, "batch": batch, "adapters": arm, "tokens/s": median(found),
            "of off": median(found) / median(off), "best": max(found),
            "best of off": max(found) / max(off),
        })  # fmt: skip
    report("lora_decode.c", {"rank": args.rank, "rounds": args.rounds}, rows, args.out)


if __name__ == "__main__":
    main()
