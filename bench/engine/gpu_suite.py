"""decode, ttft and closed_batch in one process with one engine: one JSON file and table each."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from bench.common import RESULTS, bench_parser, names_of, numbers, print_table, write_results
from bench.engine import closed_batch, decode, ttft
from bench.shapes import SHAPES, start
from hetero_llm import LLM

PARTS = ("decode", "ttft", "closed")
_FILES = {"decode": "decode", "ttft": "ttft", "closed": "closed_batch"}


def main() -> None:
    parser = bench_parser(__doc__, out="folder of the JSON files")
    parser.set_defaults(out=str(RESULTS))
    parser.add_argument("--shape", choices=list(SHAPES), default="llama-3.1-8b")
    parser.add_argument("--parts", type=names_of(PARTS), default=list(PARTS))
    parser.add_argument("--batches", type=numbers, default=list(decode.BATCHES))
    parser.add_argument("--lengths", type=numbers, default=list(ttft.LENGTHS))
    parser.add_argument("--device", default="auto")
    parser.add_argument("--sampling", action="store_true", help="decode: also top_p and top_k")
    args = parser.parse_args()
    measures: dict[str, Callable[[LLM], list[dict[str, Any]]]] = {
        "decode": lambda llm: decode.measure(
            llm, args.shape, args.batches, device=args.device, sampling=args.sampling
        ),
        "ttft": lambda llm: ttft.measure(llm, args.shape, args.lengths),
        "closed": lambda llm: closed_batch.measure(llm, args.shape),
    }
    llm, ready = start(
        SHAPES[args.shape], dtype="bfloat16", device=args.device, max_num_batched_tokens=16384,
        max_model_len=ttft.context_for(args.shape, args.lengths),
    )  # fmt: skip
    print(f"{args.shape}, random weights, bf16; ready after {ready:.1f} s", flush=True)
    tables = []
    with llm:
        for part in args.parts:
            rows = measures[part](llm)
            tables.append(rows)
            name = _FILES[part]
            write_results(
                name,
                {"shape": args.shape, "dtype": "bf16", "ready_s": ready, "rows": rows},
                str(Path(args.out) / f"{name}.{args.shape}.json"),
            )
            print_table(rows)
    print(f"\n{args.shape}, random weights, bf16; ready after {ready:.1f} s")
    for rows in tables:
        print_table(rows)


if __name__ == "__main__":
    main()
