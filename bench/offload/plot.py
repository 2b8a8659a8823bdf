"""Draws the time to the first token against the length of a prefix in host memory.

    python -m bench.offload.plot offload.ttft.json offload_ttft.png

The whole prompt is resent: computed again, loaded before it runs, loaded layer by layer while it
runs; beside them the time that the link needs for the bytes, and vLLM.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

from bench.offload.ttft import VLLM_CPU_HIT_MS

# vLLM 0.22.1 (FlashAttention 3, full CUDA graphs, torch.compile) with its offloading connector on
# one H200, Llama-3.1-8B shape, random weights, bf16: 67K-token GPU cache, prompt evicted first,
# then resent; the numbers stand with the bench that is compared with them.
VLLM_NAME = "vLLM 0.22.1, offloading connector"
_LINES = (
    ("recompute", "computed again", "#8c8c8c", "s-"),
    ("blocking", "blocking load", "#c2571a", "^-"),
    ("lazy_p50", "layer by layer", "#1f6f8b", "o-"),
    ("link", "link alone", "black", ":"),
)


def curves(results: dict[str, Any]) -> dict[str, list[tuple[int, float]]]:
    """Line to its (tokens, ms), in ascending order, of a JSON file of the part "ttft"."""
    rows = sorted(
        (row for row in results["rows"] if row["suffix"] == "resent"),
        key=lambda row: row["prefix"],
    )
    found = {name: [(row["prefix"], float(row[name])) for row in rows] for name, *_ in _LINES}
    lengths = {row["prefix"] for row in rows}
    found["vllm"] = [(n, ms) for n, ms in sorted(VLLM_CPU_HIT_MS.items()) if n in lengths]
    return found


def draw(path: Path, results: dict[str, Any]) -> None:
    """Writes the PNG."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    found = curves(results)
    figure, axes = pyplot.subplots(figsize=(7.5, 4.6))
    for name, label, colour, style in _LINES:
        axes.plot(*zip(*found[name], strict=True), style, color=colour, label=label)
    if found["vllm"]:
        axes.plot(*zip(*found["vllm"], strict=True), "D--", color="#7a4fa3", label=VLLM_NAME)
    lengths = [tokens for tokens, _ in found["lazy_p50"]]
    axes.set(
        xscale="log", yscale="log", xlabel="tokens of the prompt", ylabel="first token, ms",
        title=f"A prompt whose KV is in host memory: {results['model']}, {results['gpu']}",
    )  # fmt: skip
    axes.set_xticks(lengths, [f"{tokens // 1024}K" for tokens in lengths])
    axes.minorticks_off()
    axes.grid(alpha=0.3)
    axes.legend()
    figure.tight_layout()
    figure.savefig(path, dpi=130)
    pyplot.close(figure)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("results", type=Path, help="JSON file of bench.offload.suite's part ttft")
    parser.add_argument("picture", type=Path)
    args = parser.parse_args()
    try:
        draw(args.picture, json.loads(args.results.read_text()))
    except ImportError:
        print("no matplotlib here: run this elsewhere, with the same file")
        return
    print(f"written: {args.picture}")


if __name__ == "__main__":
    main()
