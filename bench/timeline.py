"""Real steps of engine and draft worker side by side: who computes when.

    python -m bench.timeline --model SCALE_UP --draft DRAFT [--overlap enumerate] [--out FOLDER]

One held-out prompt, greedy, cold, draft model alone. The device's verify steps are between events
around their graphs, placed on the host's clock; the worker's steps are what it notes itself
(HETERO_LLM_DRAFT_TRACE). "overlap": the share of the worker's busy time in which the device
verifies, from the first verify step to the last. Writes timeline.json (Chrome's trace format, for
chrome://tracing or Perfetto) and, with matplotlib, timeline.png.
"""

from __future__ import annotations

import argparse
import json
import os
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch

from bench.common import print_table, write_results
from bench.graph_clock import GraphClock
from bench.speculation import Bench, batches_of
from hetero_llm.gpu.model_runner import GpuModelRunner

_SHOWN = 0.04  # seconds in the picture


def overlap(draft: np.ndarray, verify: np.ndarray) -> float:
    """Share of the time in `draft` that lies in `verify`: begins and ends in the first two columns,
    ascending, disjoint."""
    shared, at = 0.0, 0
    for begin, end in draft[:, :2].tolist():
        while at < len(verify) and verify[at, 1] <= begin:
            at += 1
        for other in range(at, len(verify)):
            if verify[other, 0] >= end:
                break
            shared += min(end, verify[other, 1]) - max(begin, verify[other, 0])
    return shared / float((draft[:, 1] - draft[:, 0]).sum())


def chrome_trace(draft: np.ndarray, verify: np.ndarray) -> dict[str, Any]:
    """Both as rows of Chrome's trace viewer; times in seconds, rows of draft steps in column 2."""
    origin = verify[0, 0]
    events: list[dict[str, Any]] = [
        {"name": "thread_name", "ph": "M", "pid": 0, "tid": tid, "args": {"name": name}}
        for tid, name in enumerate(("GPU: verify", "CPU: draft worker"))
    ]
    for tid, name, spans in ((0, "verify", verify), (1, "draft", draft)):
        for span in spans.tolist():
            rows = {"rows": int(span[2])} if len(span) > 2 else {}
            events.append(
                {"name": name, "ph": "X", "pid": 0, "tid": tid, "ts": (span[0] - origin) * 1e6,
                 "dur": (span[1] - span[0]) * 1e6, "args": rows}
            )  # fmt: skip
    return {"traceEvents": events}


def spans_of(trace: dict[str, Any]) -> tuple[np.ndarray, np.ndarray]:
    """Steps of the worker and verify steps, [n, 2] each, of a trace of `chrome_trace`."""
    spans: list[list[tuple[float, float]]] = [[], []]
    for event in trace["traceEvents"]:
        if event["ph"] == "X":
            begin = event["ts"] / 1e6
            spans[event["tid"]].append((begin, begin + event["dur"] / 1e6))
    return np.array(spans[1]), np.array(spans[0])


def title_of(mode: str, share: float) -> str:
    return f"{mode}, batch 1: the GPU verifies in {share:.0%} of the worker's busy time"


def draw(path: Path, draft: np.ndarray, verify: np.ndarray, title: str) -> None:
    """The middle of the run as a picture."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    origin = verify[len(verify) // 2, 0]
    figure, axes = pyplot.subplots(figsize=(11, 2.6))
    lanes = (("draft worker (CPU)", draft, "#c2571a"), ("verify (GPU)", verify, "#1f6f8b"))
    for lane, (_, spans, colour) in enumerate(lanes):
        seen = spans[(spans[:, 1] > origin) & (spans[:, 0] < origin + _SHOWN)]
        bars = [((a - origin) * 1e3, (b - a) * 1e3) for a, b in seen[:, :2].tolist()]
        axes.broken_barh(
            bars, (lane - 0.4, 0.8), facecolors=colour, edgecolors="white", linewidth=0.6
        )
    axes.set_yticks(range(len(lanes)), [name for name, _, _ in lanes])
    axes.set_xlim(0, _SHOWN * 1e3)
    axes.set_xlabel("milliseconds")
    axes.set_title(title, fontsize=10)
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)
    figure.tight_layout()
    figure.savefig(path, dpi=130)


def measure(args: argparse.Namespace, trace: Path) -> tuple[np.ndarray, np.ndarray]:
    """[n, 3] begin, end and rows of the worker's steps; [m, 2] begin and end of verify steps."""
    os.environ["HETERO_LLM_DRAFT_TRACE"] = str(trace)
    bench = Bench(args)
    runner = bench.engine._runner
    assert isinstance(runner, GpuModelRunner)
    (batches,) = batches_of(args.batches, args.prompt)
    bench.run("none", batches[:1])
    bench.run("draft", batches[:1])  # learns times of steps
    clock = GraphClock(runner)
    base = torch.cuda.Event(enable_timing=True)
    base.record()
    base.synchronize()
    origin = time.perf_counter()
    bench.run("draft", batches[1:2])
    torch.cuda.synchronize()
    spans = [
        (origin + base.elapsed_time(begin) / 1e3, origin + base.elapsed_time(end) / 1e3)
        for key, begin, end in clock.events
        if "verify" in key[0]
    ]
    clock.stop()
    bench.close()
    verify, draft = np.array(spans), np.load(trace)
    inside = (draft[:, 1] > verify[0, 0]) & (draft[:, 0] < verify[-1, 1])
    return draft[inside], verify


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--draw", help="only draw this timeline.json")
    parser.add_argument("--model")
    parser.add_argument("--draft")
    parser.add_argument("--draft-tokens", type=int, default=6)
    parser.add_argument("--draft-threads", type=int)
    parser.add_argument("--draft-weights", default="auto")
    parser.add_argument("--overlap", default="enumerate")
    parser.add_argument("--prompt", type=int, default=1024)
    parser.add_argument("--tokens", type=int, default=256)
    parser.add_argument("--out", default=".", help="folder")
    parser.set_defaults(temperature=0.0, device="cuda", dtype="bfloat16", batches=[1])
    args = parser.parse_args()
    out = Path(args.out)
    out.mkdir(parents=True, exist_ok=True)
    if args.draw:
        draft, verify = spans_of(json.loads(Path(args.draw).read_text()))
        draw(out / "timeline.png", draft, verify, title_of(args.overlap, overlap(draft, verify)))
        return
    if not (args.model and args.draft):
        parser.error("--model and --draft are needed")
    with tempfile.TemporaryDirectory() as folder:
        draft, verify = measure(args, Path(folder) / "trace.npy")
    row = {
        "overlap": overlap(draft, verify),
        "worker busy": float((draft[:, 1] - draft[:, 0]).sum() / (verify[-1, 1] - verify[0, 0])),
        "device busy": float((verify[:, 1] - verify[:, 0]).sum() / (verify[-1, 1] - verify[0, 0])),
        "draft steps": len(draft), "verify steps": len(verify),
        "rows of a draft step": float(draft[:, 2].mean()),
    }  # fmt: skip
    print_table([row])
    (out / "timeline.json").write_text(json.dumps(chrome_trace(draft, verify)))
    try:
        draw(out / "timeline.png", draft, verify, title_of(args.overlap, float(row["overlap"])))
    except ImportError:
        print("no matplotlib here: --draw timeline.json makes the picture elsewhere")
    write_results("timeline", {**row, "mode": args.overlap}, str(out / "timeline_figures.json"))


if __name__ == "__main__":
    main()
