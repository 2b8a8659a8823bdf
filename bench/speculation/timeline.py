"""Real steps of engine and draft worker side by side: who computes when.

    python -m bench.speculation.timeline --model SCALE_UP --draft DRAFT [--out FOLDER]

Held-out prompts one at a time, greedy, cold, draft model alone. The target's steps come from events
around their graphs, placed on the host's clock; the worker records its own steps
(HETERO_LLM_DRAFT_TRACE). Only what lies between a prompt's first verify step and its last counts.

"overlap": of the worker's steps whose drafts were delivered and used, the share of the time in
which the device computes steps of the target: sum of |draft step within target's steps| over sum of
|draft step|. A worker's step is delivered and used if at least one of its nodes was in a draft that
the device verified. A target's step is one with a draft or, where there was
none in time, one without: the worker drafts behind both. "overlap, all": the same for all steps of
the worker, including those whose nodes were not used. "tok/s watched" and "tok/s": with events and
notes of the engine's side, and without: what watching costs.

Writes timeline.json (Chrome's trace format, for chrome://tracing or Perfetto; of the first text)
and, with matplotlib, timeline.png.
"""

from __future__ import annotations

import argparse
import json
import os
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from bench.common import bench_parser, print_table, write_results
from bench.speculation.arms import Bench, SwitchedDrafter, add_arguments, batches_of
from bench.speculation.graph_clock import GraphClock
from hetero_llm.core.draft_tree import DraftBatch
from hetero_llm.core.request import Sequence
from hetero_llm.gpu.model_runner import GpuModelRunner
from hetero_llm.spec_decode.draft_model.proposer import DraftModelProposer
from hetero_llm.spec_decode.draft_model.tree_arrays import ID, PARENT, TOKEN
from hetero_llm.spec_decode.hybrid_drafter import HybridDrafter

_SHOWN = 0.03  # seconds in the picture


def overlap(draft: np.ndarray, verify: np.ndarray) -> float:
    """Share of the time in `draft` that lies in `verify`: begins and ends in the first two columns,
    ascending, disjoint. 0 without any draft."""
    if not len(draft):
        return 0.0
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
    return (
        f"batch 1, '{mode}': {share:.0%} of the worker's computing lies under a step of the target"
    )


def draw(path: Path, draft: np.ndarray, verify: np.ndarray, title: str) -> None:
    """The middle of the run as a picture."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    origin = verify[len(verify) // 2, 0]
    figure, axes = pyplot.subplots(figsize=(10, 2.9))
    lanes = (("draft worker\n(CPU)", draft, "#c2571a"), ("target\n(GPU)", verify, "#1f6f8b"))
    bars = {}
    for name, spans, _ in lanes:
        seen = spans[(spans[:, 1] > origin) & (spans[:, 0] < origin + _SHOWN)]
        bars[name] = [((a - origin) * 1e3, (b - a) * 1e3) for a, b in seen[:, :2].tolist()]
    for begin, width in bars[lanes[1][0]]:  # what lies below a step of the target
        axes.axvspan(begin, begin + width, color="#1f6f8b", alpha=0.13, linewidth=0)
    for lane, (name, _, colour) in enumerate(lanes):
        axes.broken_barh(
            bars[name], (lane - 0.36, 0.72), facecolors=colour, edgecolors="white", linewidth=0.8
        )
    for begin, width in bars[lanes[1][0]]:
        if begin >= 0 and begin + width <= _SHOWN * 1e3:
            axes.text(
                begin + width / 2, 1, f"{width:.1f} ms",
                color="white", ha="center", va="center", fontsize=9,
            )  # fmt: skip
    axes.set_yticks(range(len(lanes)), [name for name, _, _ in lanes])
    axes.tick_params(axis="y", length=0)
    axes.set_ylim(-0.55, 1.55)
    axes.set_xlim(0, _SHOWN * 1e3)
    axes.set_xlabel("milliseconds; white: the GPU waits")
    axes.set_title(title, fontsize=10)
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)
    figure.tight_layout()
    figure.savefig(path, dpi=130)


class Watched:
    """Notes of a `SwitchedDrafter`'s proposals: the worker's nodes as the engine knew them, and the
    drafts that were made of them, of single sequences."""

    def __init__(self, switch: SwitchedDrafter) -> None:
        self._switch, self._propose = switch, switch.propose
        self.notes: list[tuple[int, np.ndarray, DraftBatch]] = []
        switch.propose = self._noting  # type: ignore[method-assign]

    def stop(self) -> None:
        self._switch.propose = self._propose  # type: ignore[method-assign]

    def _noting(self, sequences: list[Sequence], limits: list[int], num_rows: int) -> DraftBatch:
        drafts = self._propose(sequences, limits, num_rows)
        inner = self._switch.inner
        if isinstance(inner, HybridDrafter) and isinstance(inner.model, DraftModelProposer):
            replica = inner.model._replica
            nodes = replica.arrays.nodes[0, : replica.num_nodes(0)].copy()
            self.notes.append((int(inner.model._generations[0]), nodes, drafts))
        return drafts


def used_ids(notes: list[tuple[int, np.ndarray, DraftBatch]]) -> dict[int, set[int]]:
    """Ids of the worker's nodes that were in drafts, by the generation of their text."""
    used: dict[int, set[int]] = {}
    for generation, nodes, drafts in notes:
        row_of = {(int(n[PARENT]), int(n[TOKEN])): row for row, n in enumerate(nodes)}
        rows: list[int | None] = []
        pairs = zip(drafts.token_ids.tolist(), drafts.parents.tolist(), strict=True)
        for token, parent in pairs:
            above = rows[parent] if parent >= 0 else -1
            rows.append(None if above is None else row_of.get((above, token)))
        used.setdefault(generation, set()).update(
            int(nodes[row, ID]) for row in rows if row is not None
        )
    return used


def is_used(draft: np.ndarray, used: dict[int, set[int]]) -> np.ndarray:
    """[n] bool of the worker's steps, [n, 6] as it notes them."""
    return np.array(
        [
            any(identity in used.get(int(generation), ()) for identity in range(first, last + 1))
            for generation, first, last in draft[:, 3:].astype(np.int64).tolist()
        ],
        np.bool_,
    )


def busy(spans: np.ndarray) -> float:
    return float((spans[:, 1] - spans[:, 0]).sum())


@dataclass(frozen=True)
class Text:
    """What one text took: [n, 6] the worker's steps as it notes them, [m, 2] begin and end of the
    target's, those with drafts marked in [m]."""

    draft: np.ndarray
    steps: np.ndarray
    has_draft: np.ndarray


def figures(texts: list[Text], used: dict[int, set[int]]) -> dict[str, float]:
    """See the module."""
    marks = [is_used(text.draft, used) for text in texts]
    wanted = [text.draft[mark] for text, mark in zip(texts, marks, strict=True)]
    whole = sum(text.steps[-1, 1] - text.steps[0, 0] for text in texts)

    def share(drafts: list[np.ndarray]) -> float:
        total = sum(map(busy, drafts))
        pairs = zip(drafts, texts, strict=True)
        hidden = sum(overlap(draft, text.steps) * busy(draft) for draft, text in pairs)
        return hidden / total if total else 0.0

    num_drafts = sum(len(text.draft) for text in texts)
    rows = sum(text.draft[:, 2].sum() for text in texts)
    gaps = np.concatenate([text.steps[1:, 0] - text.steps[:-1, 1] for text in texts])
    return {
        "overlap": share(wanted),
        "overlap, all": share([text.draft for text in texts]),
        "used": sum(map(len, wanted)) / max(num_drafts, 1),
        "worker busy": sum(busy(text.draft) for text in texts) / whole,
        "device busy": sum(busy(text.steps) for text in texts) / whole,
        "draft steps": num_drafts,
        "verify steps": int(sum(text.has_draft.sum() for text in texts)),
        "plain steps": int(sum((~text.has_draft).sum() for text in texts)),
        "rows of a draft step": rows / max(num_drafts, 1),
        "draft step ms": sum(busy(text.draft) for text in texts) / max(num_drafts, 1) * 1e3,
        "gap p50 ms": float(np.median(gaps)) * 1e3,
        "gap p90 ms": float(np.quantile(gaps, 0.9)) * 1e3,
    }


def watch(
    bench: Bench, batches: list[list[list[int]]]
) -> tuple[list[tuple[np.ndarray, np.ndarray]], Watched, float]:
    """Runs batches of one with drafts. Returns, of each, its steps and which have drafts, [m, 2]
    and [m]; the notes; tokens/s of all."""
    runner = bench.engine.runner
    assert isinstance(runner, GpuModelRunner)
    notes, clock = Watched(bench.switch), GraphClock(runner)
    base = torch.cuda.Event(enable_timing=True)
    base.record()
    base.synchronize()
    origin = time.perf_counter()
    found, seconds = [], 0.0
    for batch in batches:
        clock.events.clear()
        _, rates = bench.run("draft", [batch])
        torch.cuda.synchronize()
        seconds += 1.0 / rates["tok/s"]
        events = [e for e in clock.events if "verify" in e[0][0] or "decode" in e[0][0]]
        has_draft = np.array(["verify" in key[0] for key, _, _ in events])
        spans = np.array([
            [origin + base.elapsed_time(at) / 1e3 for at in (begin, end)]
            for _, begin, end in events
        ])  # fmt: skip
        first, last = np.flatnonzero(has_draft)[[0, -1]]
        found.append((spans[first : last + 1], has_draft[first : last + 1]))
    clock.stop()
    notes.stop()
    return found, notes, len(batches) / seconds


def measure(args: argparse.Namespace, trace: Path) -> tuple[list[Text], dict[str, float]]:
    """The texts that were watched, and figures of them."""
    os.environ["HETERO_LLM_DRAFT_TRACE"] = str(trace)
    bench = Bench(args)
    (batches,) = batches_of(args.batches, args.prompt)
    bench.run("none", batches[:1])
    bench.run("draft", batches[:1])  # learns times of steps
    batches = batches[1 : 1 + args.prompts]
    _, alone = bench.run("draft", batches)
    found, notes, rate = watch(bench, batches)
    bench.close()
    draft = np.load(trace)
    texts = []
    for steps, has_draft in found:
        inside = (draft[:, 1] > steps[0, 0]) & (draft[:, 0] < steps[-1, 1])
        texts.append(Text(draft[inside], steps, has_draft))
    rates = {"tok/s": alone["tok/s"], "tok/s watched": rate}
    return texts, figures(texts, used_ids(notes.notes)) | rates


def main() -> None:
    parser = bench_parser(__doc__, out="folder")
    add_arguments(parser, batches=False)
    parser.set_defaults(overlap="enumerate", batches=[1], out=".")
    parser.add_argument("--draw", help="only draw this timeline.json")
    parser.add_argument("--model")
    parser.add_argument("--prompts", type=int, default=4, help="that are watched, at most 7")
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
        texts, row = measure(args, Path(folder) / "trace.npy")
    print_table([row])
    draft, verify = texts[0].draft, texts[0].steps
    (out / "timeline.json").write_text(json.dumps(chrome_trace(draft[:, :3], verify)))
    try:
        draw(out / "timeline.png", draft, verify, title_of(args.overlap, overlap(draft, verify)))
    except ImportError:
        print("no matplotlib here: --draw timeline.json makes the picture elsewhere")
    write_results("timeline", {**row, "mode": args.overlap}, str(out / "timeline_figures.json"))


if __name__ == "__main__":
    main()
