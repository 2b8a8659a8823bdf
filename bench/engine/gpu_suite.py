"""decode, ttft and closed_batch in one process: one JSON file and table each.

With --quantization one engine for each of the kinds named, one after the other, with random weights
rounded while they are loaded; the file names then end in the kind, `none` (bf16) excepted. Several
kinds also give `quantized.SHAPE.json`: a row for each kind with all figures and, beside each, what
part of bf16's time it is.

    python -m bench.engine.gpu_suite --batches 1,8,32,128 --lengths 4096,16384 \\
        --quantization none,fp8,fp8_block,ifq,ifq_nf4,int4 --out FOLDER
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from pathlib import Path
from typing import Any

from bench.common import (
    RESULTS,
    Rows,
    bench_parser,
    names_of,
    numbers,
    print_table,
    write_results,
)
from bench.engine import closed_batch, decode, ttft
from bench.shapes import SHAPES, start
from hetero_llm import LLM

PARTS = ("decode", "ttft", "closed")
NONE = "none"
KINDS = (NONE, "fp8", "int4", "fp8_block", "ifq", "ifq_nf4")  # in the order of their runs
_FILES = {"decode": "decode", "ttft": "ttft", "closed": "closed_batch"}
# Of each part: the column that tells its rows apart, our figure, the peer's.
_COLUMNS = {
    "decode": ("batch", "ms_per_step", "vllm_ms"),
    "ttft": ("prompt", "cold_ms", "vllm_cold_ms"),
    "closed": ("requests", "seconds", "vllm_seconds"),
}

# vLLM 0.26.0 on one H200, the Llama-3.1-8B shape; as int4 AWQ-Marlin, as int8 GPTQ.
VLLM: dict[tuple[str, str, str], dict[Any, float]] = {
    ("llama-3.1-8b", "fp8", "decode"): {1: 3.48, 8: 3.55, 32: 4.48, 128: 5.67},
    ("llama-3.1-8b", "fp8", "ttft"): {4096: 65.8, 16384: 345},
    ("llama-3.1-8b", "fp8", "closed"): {"64 x (1024 in, 128 out)": 1.73},
    ("llama-3.1-8b", "ifq", "decode"): {1: 4.82, 8: 4.96, 32: 5.44, 128: 6.98},
    ("llama-3.1-8b", "int4", "decode"): {1: 3.99, 8: 4.05, 32: 4.61, 128: 7.23},
}


def measure(args: argparse.Namespace, kind: str) -> tuple[dict[str, Rows], float]:
    """The tables of one engine by part, and the seconds until it was ready."""
    measures: dict[str, Callable[[LLM], Rows]] = {
        "decode": lambda llm: decode.measure(
            llm, args.shape, args.batches, device=args.device, sampling=args.sampling
        ),
        "ttft": lambda llm: ttft.measure(llm, args.shape, args.lengths),
        "closed": lambda llm: closed_batch.measure(llm, args.shape),
    }
    llm, ready = start(
        SHAPES[args.shape], dtype="bfloat16", device=args.device, max_num_batched_tokens=16384,
        max_model_len=ttft.context_for(args.shape, args.lengths),
        quantization=None if kind == NONE else kind,
    )  # fmt: skip
    print(heading(args.shape, kind, ready), flush=True)
    tables = {}
    with llm:
        for part in args.parts:
            tables[part] = measures[part](llm)
            if kind != NONE:
                with_peer(tables[part], args.shape, kind, part)
            print_table(tables[part])
    return tables, ready


def with_peer(rows: Rows, shape: str, kind: str, part: str) -> None:
    """Puts the peer's figures of a kind into the place of those of bf16."""
    key, _, column = _COLUMNS[part]
    figures = VLLM.get((shape, kind, part), {})
    for row in rows:
        row[column] = figures.get(row[key], "-")
        if "vllm_hit_ms" in row:
            row["vllm_hit_ms"] = "-"


def heading(shape: str, kind: str, ready: float) -> str:
    weights = "bf16" if kind == NONE else kind
    return f"\n{shape}, random weights, {weights}; ready after {ready:.1f} s"


def together(tables: dict[str, dict[str, Rows]]) -> Rows:
    """A row for each kind with the figures of all parts, over those of `none` if that is there."""
    plain = tables.get(NONE, {})
    result = []
    for kind, parts in tables.items():
        line: dict[str, Any] = {"quantization": kind}
        for part, rows in parts.items():
            key, column, _ = _COLUMNS[part]
            beside = {row[key]: row[column] for row in plain.get(part, [])}
            for row in rows:
                name = part if part == "closed" else f"{part} {row[key]}"
                line[name] = row[column]
                line[f"{name} over bf16"] = (
                    row[column] / beside[row[key]] if row[key] in beside else "-"
                )
        result.append(line)
    return result


def main() -> None:
    parser = bench_parser(__doc__, out="folder of the JSON files")
    parser.set_defaults(out=str(RESULTS))
    parser.add_argument("--shape", choices=list(SHAPES), default="llama-3.1-8b")
    parser.add_argument("--parts", type=names_of(PARTS), default=list(PARTS))
    parser.add_argument("--batches", type=numbers, default=list(decode.BATCHES))
    parser.add_argument("--lengths", type=numbers, default=list(ttft.LENGTHS))
    parser.add_argument("--device", default="auto")
    parser.add_argument("--sampling", action="store_true", help="decode: also top_p and top_k")
    parser.add_argument("--quantization", type=names_of(KINDS), default=[NONE])
    args = parser.parse_args()
    tables, ready = {}, {}
    for kind in args.quantization:
        tables[kind], ready[kind] = measure(args, kind)
        suffix, dtype = ("", "bf16") if kind == NONE else (f".{kind}", kind)
        for part, rows in tables[kind].items():
            name = _FILES[part]
            write_results(
                name,
                {"shape": args.shape, "dtype": dtype, "ready_s": ready[kind], "rows": rows},
                str(Path(args.out) / f"{name}.{args.shape}{suffix}.json"),
            )
        if len(args.quantization) > 1:  # after each kind: a run that is cut off leaves a table
            results = {"shape": args.shape, "ready_s": ready, "rows": together(tables)}
            path = Path(args.out) / f"quantized.{args.shape}.json"
            write_results("quantized", results, str(path))
    for kind, parts in tables.items():
        print(heading(args.shape, kind, ready[kind]))
        for rows in parts.values():
            print_table(rows)
    if len(tables) > 1:
        print_table(together(tables))


if __name__ == "__main__":
    main()
