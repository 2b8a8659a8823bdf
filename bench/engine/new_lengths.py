"""First tokens of prompts whose lengths an engine has not met, beside the next ones of each length.

    python -m bench.engine.new_lengths [--shape llama-3.1-8b] [--count 12] [--longest 8000]
        [--again 3] [--device cuda] [--out FILE]

Most benches repeat one length, and an engine that plans, compiles or tunes something for each
length looks good there. Lengths are drawn from `--seed`, evenly in their logarithm from 32 tokens
on; all prompts differ, and are computed alone. The engine has served nothing before the first one.

- `first_ms`: of the first prompt of a length, in the order in which they came;
- `again_ms`: median of the next ones; `over`: first_ms / again_ms.
"""

from __future__ import annotations

import math
import statistics
from typing import Any

import numpy as np

from bench.common import Rows, bench_parser, report
from bench.generation import first_token_ms
from bench.shapes import SHAPES, Prompts, start

_LEAST = 32


def random_lengths(count: int, longest: int, seed: int) -> list[int]:
    """`count` different lengths of `_LEAST` to `longest` tokens, in random order."""
    rng = np.random.default_rng(seed)
    found: dict[int, None] = {}
    while len(found) < count:
        found[int(round(math.exp(rng.uniform(math.log(_LEAST), math.log(longest)))))] = None
    return list(found)


def main() -> None:
    parser = bench_parser(__doc__)
    parser.add_argument("--shape", choices=SHAPES, default="llama-3.1-8b")
    parser.add_argument("--count", type=int, default=12, help="lengths")
    parser.add_argument("--longest", type=int, default=8000, help="tokens")
    parser.add_argument("--again", type=int, default=3, help="prompts of a length after the first")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--device", default="cuda")
    args = parser.parse_args()
    shape = SHAPES[args.shape]
    engine: dict[str, Any] = {"dtype": "bfloat16", "device": args.device}
    llm, ready_s = start(shape, max_model_len=args.longest + 16, **engine)
    prompts = Prompts(shape["vocab_size"], seed=args.seed)
    table: Rows = []
    for tokens in random_lengths(args.count, args.longest, args.seed):
        first, *again = (first_token_ms(llm, prompts.one(tokens))[0] for _ in range(1 + args.again))
        later = statistics.median(again)
        table.append(
            {"tokens": tokens, "first_ms": first, "again_ms": later, "over": first / later}
        )
    llm.close()
    over = [row["over"] for row in table]
    about = {"model": args.shape, "device": args.device, "ready_s": ready_s, "seed": args.seed}
    about |= {"median_over": statistics.median(over), "largest_over": max(over)}
    print(
        f"first over again: median {about['median_over']:.2f}, largest {about['largest_over']:.2f}"
    )
    report("new_lengths", about, table, args.out)


if __name__ == "__main__":
    main()
