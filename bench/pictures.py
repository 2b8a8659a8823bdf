"""What `bench.plot` draws: a picture for each bench, or why a results file is in none."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from bench.common import RESULTS

Row = dict[str, Any]
Results = dict[str, Any]

_MACHINES = {"c": "2-core CPU box", "g": "H200 node", "cuda": "H200 node"}
"""By the last word of a results file's name."""


@dataclass(frozen=True)
class Panel:
    """One pair of axes.

    Attributes:
        files: results files without `.json`; their rows stand one after the other.
        columns: column of a row to its name in the legend.
        x: column of the horizontal axis (`across`: of the vertical one).
        unit: of the columns, at their axis.
        rows: key of the rows in a file, or what makes rows of a file.
        by: columns that part the rows into groups. What stands beside the rows in the file counts
            as a column; `machine` and `at` are its machine and commit.
        where: columns to the value that a row must have to be shown.
        kind: lines; bars beside each other; bars from left to right.
        log: axes with a logarithmic scale: "", "x", "y" or "xy".
        level: where a line is drawn for comparison.
    """

    files: tuple[str, ...]
    title: str
    columns: Mapping[str, str]
    x: str
    unit: str
    x_label: str = ""
    rows: str | Callable[[Results], list[Row]] = "rows"
    by: tuple[str, ...] = ()
    where: Mapping[str, Any] = field(default_factory=dict)
    kind: Literal["lines", "bars", "across"] = "lines"
    log: str = ""
    level: float | None = None

    def table(self, results: Mapping[str, Results]) -> list[Row]:
        """The rows that are shown, of the results by file."""
        found = []
        for name, content in results.items():
            rows = content[self.rows] if isinstance(self.rows, str) else self.rows(content)
            about = {k: value for k, value in content.items() if isinstance(value, (str, int))}
            about["at"] = f"commit {content['commit']}"
            about["machine"] = _MACHINES.get(name.rpartition(".")[2], "")
            found += [{**about, **row} for row in rows]
        return [row for row in found if all(row[k] == value for k, value in self.where.items())]

    def key(self) -> str:
        """All that decides how the panel looks, but for its results."""
        rows = self.rows if isinstance(self.rows, str) else self.rows.__name__
        return repr((self.title, self.columns, self.x, self.unit, self.x_label, rows, self.by,
                     self.where, self.kind, self.log, self.level))  # fmt: skip


@dataclass(frozen=True)
class Picture:
    """`section`: the heading of docs/benchmarks.md that links it."""

    title: str
    section: str
    panels: tuple[Panel, ...]


def _cpu_offline(results: Results) -> list[Row]:
    """A row for each work, named by model, type, peer and work."""
    peers = [p["runner"] for p in results["processes"] if p["runner"] != "ours"]
    peer = peers[0] if peers else "none"
    works = {
        "prefill": "prefill of 512",
        "decode1": "decode, batch 1",
        "decode8": "decode, batch 8",
    }
    return [
        {
            "ours": row["ours of limit"], "peer": row.get(f"{peer} of limit", "-"),
            "what": f"{results['model']} {results['dtype']}, {works[row['work']]}"
                    + (f"; {peer.replace('_', ' ')}" if peers else "; 12 AMX cores")
                    + f" ({results['commit'].removesuffix('-dirty')})",
        }
        for row in results["rows"]
    ]  # fmt: skip


def _families(results: Results) -> list[Row]:
    """With another name for Llama's second run, the last of all."""
    found, seen = [], set()
    for row in results["rows"]:
        key = row["family"], row["batch"]
        found.append({**row, "family": f"{row['family']}, again"} if key in seen else row)
        seen.add(key)
    return found


def _with_drafts(results: Results) -> list[Row]:
    """Without the rows of the run that all others are compared with."""
    return [row for row in results["rows"] if row["drafts"] != "none"]


def _settings_of(results: Results) -> list[Row]:
    """With the temperature and shape of the run in each row."""
    about = f"{results['model']}, temperature {results['temperature']:g}"
    return [{**row, "about": about} for row in _with_drafts(results)]


def _agreement(results: Results) -> list[Row]:
    """Of rows named `draft 0.2 auto`, with the agreement as a number; only draft models."""
    found = []
    for row in results["rows"]:
        if name := re.fullmatch(r"draft ([\d.]+) auto", row["drafts"]):
            first = row.get("first half", "-")
            found.append({**row, "agreement": float(name[1]), "first half": first})
    return found


def _best_tiles(results: Results) -> list[Row]:
    """The best of all tile shapes for each batch and context."""
    tiles = results["tiles"]
    loads = [column.removesuffix(" us") for column in tiles[0] if column.endswith(" us")]
    return [{"load": load, "us": min(tile[f"{load} us"] for tile in tiles)} for load in loads]


def _best_trees(results: Results) -> list[Row]:
    """The best tile shape for each batch and number of nodes, over one token."""
    found = []
    for tree in results["trees"]:
        sizes: dict[int, float] = {1: 1.0}
        for column, ratio in tree.items():
            if name := re.match(r"(\d+)r ", column):
                size = int(name[1])
                sizes[size] = min(sizes.get(size, ratio), ratio)
        found += [{"batch": tree["batch"], "nodes": n, "ratio": r} for n, r in sizes.items()]
    return found


def _hits(results: Results) -> list[Row]:
    """Offload's parts of one row, as a row for each case."""
    (row,) = results["rows"]
    cases = {
        "behind": {"alone": "1K hit alone", "behind": "1K hit behind 64K"},
        "shared": {"one": "10K hit alone", "all": "50 requests on it"},
        "decode": {"none": "step of 32, no loads", "loads": "step of 32, loads"},
    }[results["part"]]
    return [
        {"case": case, "p50": row[f"{name}_ms_p50"], "p99": row[f"{name}_ms_p99"]}
        for name, case in cases.items()
    ]


def _busy(results: Results) -> list[Row]:
    return [
        {"case": row["hit"].replace("4096 tokens", "4K"), "quiet": row["quiet_ms_p50"],
         "busy": row["busy_ms_p50"]}
        for row in results["rows"]
    ]  # fmt: skip


def _engines(results: Results) -> list[Row]:
    """A row for each column that is a rate, of a single row of `draft_faults`."""
    (row,) = results["rows"]
    return [{"case": name, "tok/s": row[f"{name} tok/s"]} for name in ("none", "stopped", "killed")]


def _rings(results: Results) -> list[Row]:
    return [row for row in results["rows"] if row["way"] != "empty" and row["mode"] == "spin"]


def _greedy_and_sampled(results: Results) -> list[Row]:
    """Wide logits only, the kinds that most requests have."""
    names = {"greedy": "greedy", "sample": "temperature", "k50 p.95": "top_k 50, top_p 0.95"}
    return [
        {**row, "kind": names[row["kind"]]}
        for row in results["rows"]
        if row["spread"] == 1.0 and row["kind"] in names
    ]


def _decode_by_kind(results: Results) -> list[Row]:
    return [
        {
            "quantization": row["quantization"],
            "batch": batch,
            "ms": row[f"decode {batch}"],
            "over bf16": row[f"decode {batch} over bf16"],
        }
        for row in results["rows"]
        for batch in (1, 8, 32, 128)
    ]


def _batch(**more: Any) -> dict[str, Any]:
    return {"x": "batch", "x_label": "batch", "log": "x", **more}


def _all(pattern: str) -> tuple[str, ...]:
    """The results files of a pattern, in alphabetical order."""
    return tuple(sorted(path.stem for path in RESULTS.glob(f"{pattern}.json")))


_CPU_OFFLINE = (
    "S.bfloat16.openvino.c", "S.int8.openvino.c", "M.bfloat16.llama_cpp.c",
    "M.bfloat16.openvino.c", "M.bfloat16.prefill.openvino.c", "L.bfloat16.llama_cpp.c",
    "L.bfloat16.vllm_cpu.c", "L.int8.openvino.c", "M.bfloat16.g", "L.bfloat16.g",
)  # fmt: skip
_OVER_NONE = {"over none": ""}

PICTURES: dict[str, Picture] = {
    "gpu_suite": Picture(
        "Decode step and first token, bf16, greedy", "Decode",
        (
            Panel(("decode.llama-3.1-8b",), "Llama-3.1-8B shape, decode step",
                  {"ms_per_step": "hetero_llm", "vllm_ms": "vLLM, better of two runs",
                   "cublas_ms": "cuBLAS alone"}, unit="ms", **_batch()),
            Panel(("decode.mistral-7b", "decode.qwen2.5-7b", "decode.llama-3.2-1b"),
                  "other shapes, decode step over cuBLAS alone", {"ours/cublas": ""},
                  unit="times", by=("shape",), level=1.0, **_batch()),
            Panel(("ttft.llama-3.1-8b",), "Llama-3.1-8B shape, first token",
                  {"cold_ms": "cold", "vllm_cold_ms": "cold, vLLM",
                   "hit_ms": "prompt cached on the GPU", "vllm_hit_ms": "cached, vLLM"},
                  x="prompt", x_label="tokens of the prompt", unit="ms", log="xy"),
        ),
    ),
    "quantized": Picture(
        "Quantized weights, Llama-3.1-8B shape", "Quantized weights",
        (
            Panel(("quantized.llama-3.1-8b",), "decode step", {"ms": ""}, unit="ms",
                  rows=_decode_by_kind, by=("quantization",), **_batch()),
            Panel(("quantized.llama-3.1-8b",), "over bf16", {"over bf16": ""}, unit="times",
                  rows=_decode_by_kind, by=("quantization",), level=1.0, **_batch()),
        ),
    ),
    "verify": Picture(
        "Verify steps: time on the device, and how long the device is idle between two",
        "Verify steps",
        (
            Panel(("verify.llama-3.1-8b",), "step of 7 nodes a sequence",
                  {"7 right: step ms": "verify", "plain device ms": "decode"}, unit="ms",
                  **_batch()),
            Panel(("verify.llama-3.1-8b",), "gap, a drafter that knows the answer",
                  {f"{n} right: gap ms": f"{n} nodes accepted" for n in (0, 3, 7)}, unit="ms",
                  **_batch()),
            Panel(("lookahead_gaps.g",), "gap, the lookahead cache proposes",
                  {"gap p50": "p50", "gap p90": "p90"}, unit="ms", **_batch()),
        ),
    ),
    "host_gap": Picture(
        "The host's time between two verify steps, lookahead cache, scale-up target",
        "Verify steps",
        (
            Panel(("host_gap.g", "rooms/host_gap.h200.before"), "results to launch",
                  {"gap": "p50", "gap p90": "p90"}, unit="us", by=("at",), **_batch()),
            Panel(("host_gap.g",), "what it consists of",
                  {"schedule": "scheduler", "propose": "proposal", "look up": "of which lookups",
                   "choose": "of which budget"}, unit="us", **_batch()),
        ),
    ),
    "attention": Picture(
        "Paged attention of one layer, Llama-3.1-8B shape", "Kernels",
        (
            Panel(("attention.g",), "one token a sequence, best tile", {"us": ""},
                  x="load", unit="us", x_label="batch x context", rows=_best_tiles, kind="across"),
            Panel(("attention.g",), "draft trees over one token, best tile", {"ratio": ""},
                  x="nodes", x_label="tokens of a sequence", unit="times", rows=_best_trees,
                  by=("batch",), log="x"),
        ),
    ),
    "sample": Picture(
        "Sampling, vocabulary 128,256", "Kernels",
        (
            Panel(("kernels_pick.g",), "logits of spread 1",
                  {"us": "ours", "argmax us": "torch.argmax", "sorting us": "torch, sorting"},
                  x="rows", x_label="tokens", unit="us", rows=_greedy_and_sampled, by=("kind",),
                  log="xy"),
        ),
    ),
    "skinny_gemm": Picture(
        "All linear layers of the Llama-3.1-8B shape, few tokens", "Kernels",
        (
            Panel(("kernels_small_linear.g",), "",
                  {"library_ms": "cuBLAS", "linear_ms": "ours where faster, else cuBLAS",
                   "ours_ms": "ours"}, x="rows", x_label="tokens", unit="ms", rows="stacks",
                  log="x"),
        ),
    ),
    "step_parts": Picture(
        "Small kernels around a step beside a copy of the same bytes", "Kernels",
        (
            Panel(("kernels_step_parts.g",), "", {"ours_us": "ours", "copy_us": "copy"},
                  x="rows", x_label="tokens", unit="us", by=("kernel",), log="xy"),
        ),
    ),
    "gpu_ceilings": Picture(
        "What the card can do: products of the Llama-3.1-8B shape through cuBLAS", "Kernels",
        (
            Panel(("gpu_ceilings.g",), "decode: all linear layers", {"stack ms": ""}, x="rows",
                  x_label="tokens", unit="ms", rows="decode_stack", log="x"),
            Panel(("gpu_ceilings.g",), "prefill: all linear layers", {"TFLOP/s": ""}, x="rows",
                  x_label="tokens", unit="TFLOP/s", rows="prefill_layers", log="x"),
        ),
    ),
    "families": Picture(
        "Bytes read per second in decoding, over Llama's", "Model families",
        (
            Panel(("families.g",), "", {"of_llama": ""}, x="family", unit="times",
                  rows=_families, by=("batch",), kind="across", level=1.0),
        ),
    ),
    "other_back_ends": Picture(
        "transformers' class beside the native family; a mixture of experts beside its memory"
        " traffic", "Model families",
        (
            Panel(("transformers_backend.g",), "Llama-3.1-8B shape, decode step",
                  {"native_ms": "native file", "transformers_ms": "transformers' class"},
                  x="batch", x_label="batch", unit="ms", kind="bars"),
            Panel(("moe_decode.g",), "Mixtral-8x7B shape, decode step",
                  {"ms_per_step": "hetero_llm", "limit_ms": "reading what it touches"},
                  x="batch", x_label="batch", unit="ms", kind="bars"),
        ),
    ),
    "speculation": Picture(
        "Without a draft model: tokens/s over the same engine without drafts",
        "Without a draft model",
        (
            Panel(("speculation.cuda",), "Mistral-7B shape, by batch or kind of prompt", _OVER_NONE,
                  x="work", unit="times", rows=_with_drafts, by=("drafts",), kind="bars",
                  level=1.0),
            Panel(("speculation.128.cuda",), "another run", _OVER_NONE, x="work", unit="times",
                  rows=_with_drafts, by=("drafts",), kind="bars", level=1.0),
            Panel(("speculation.c",), "demo target on a CPU, bf16", _OVER_NONE, x="work",
                  unit="times", rows=_with_drafts, by=("drafts",), kind="bars", level=1.0),
            Panel(("speculation.no_budget.c",), "demo target on a CPU, fp32, all drafts verified",
                  _OVER_NONE, x="work", unit="times", rows=_with_drafts, by=("drafts",),
                  kind="bars", level=1.0),
        ),
    ),
    "speculation_draft": Picture(
        "With a draft model: tokens/s over the same engine without drafts",
        "With a draft model on the CPU",
        (
            Panel(("speculation.draft.cuda",), "Mistral-7B shape, draft model on the CPU",
                  _OVER_NONE, x="work", unit="times", rows=_with_drafts, by=("drafts",),
                  kind="bars", level=1.0),
            Panel(("speculation.gpu_draft.cuda",), "draft model on the GPU", _OVER_NONE, x="work",
                  unit="times", rows=_with_drafts, by=("drafts",), kind="bars", level=1.0),
            Panel(("speculation.greedy.cuda", "speculation.sampled.cuda", "speculation.13b.cuda"),
                  "draft model on the CPU, alone", _OVER_NONE, x="work", unit="times",
                  rows=_settings_of, by=("about",), kind="bars", level=1.0),
        ),
    ),
    "never_slower": Picture(
        "Draft models of chosen quality, text without loops: tokens/s over none",
        "Drafts of chosen quality, text without loops",
        (
            Panel(("never_slower.g",), "whole batch", _OVER_NONE, x="agreement", unit="times",
                  x_label="agreement of draft and target", rows=_agreement, by=("batch",),
                  level=1.0),
            Panel(("never_slower.g",), "until half of the tokens are there", {"first half": ""},
                  x="agreement", unit="times", x_label="agreement of draft and target",
                  rows=_agreement, by=("batch",), level=1.0),
            Panel(("rooms/never_slower.e35d071.g",), "whole batch, an earlier commit", _OVER_NONE,
                  x="agreement", unit="times", x_label="agreement of draft and target",
                  rows=_agreement, by=("batch",), level=1.0),
        ),
    ),
    "draft_worker": Picture(
        "The draft worker: a step of its model, the hand-off, a worker that fails",
        "Drafts of chosen quality, text without loops",
        (
            Panel(("draft_step.g",), "68M shape, 12 AMX cores, tree of branches",
                  {"ours_ms": "ours", "eager_ms": "PyTorch eager, bf16",
                   "read_ms": "plain read of the weights"}, x="rows", x_label="tokens", unit="ms",
                  by=("weights",), where={"threads": 12, "kind": "branches"}, log="xy"),
            Panel(("rings.g",), "hand-off between the processes",
                  {"p50_us": "p50", "p99_us": "p99"}, unit="us", rows=_rings, by=("way",),
                  **_batch(log="xy")),
            Panel(("draft_faults.g",), "target's tokens/s, worker stopped or killed",
                  {"tok/s": ""}, x="case", unit="tokens/s", rows=_engines, kind="bars"),
        ),
    ),
    "lookahead_cache": Picture(
        "Cost of the lookahead cache, 1M tokens of history",
        "Drafts of chosen quality, text without loops",
        (
            Panel(("lookahead_cache.g",), "a proposal, H200 node", {"propose us": ""}, unit="us",
                  by=("cache",), **_batch(log="xy")),
            Panel(("lookahead_cache.c",), "a proposal, 2-core CPU box", {"propose us": ""},
                  unit="us", by=("cache",), **_batch(log="xy")),
            Panel(("lookahead_cache.g",), "learning a token, H200 node", {"learn us/token": ""},
                  unit="us", by=("cache",), **_batch(log="xy")),
        ),
    ),
    "replay_drafts": Picture(
        "Drafters along recorded outputs, without a model",
        "Drafts of chosen quality, text without loops",
        (
            Panel(("replay_drafts.c",), "tokens from a step", {"tokens/step": ""}, x="batch",
                  x_label="batch", unit="tokens", by=("drafts",), kind="bars"),
            Panel(("replay_drafts.c",), "nodes drafted for a step", {"drafted/step": ""},
                  x="batch", x_label="batch", unit="nodes", by=("drafts",), kind="bars"),
        ),
    ),
    "offload": Picture(
        "KV in host memory, Llama-3.1-8B shape", "KV offload",
        (
            Panel(("offload.behind.g", "offload.shared.g", "offload.decode.g"),
                  "first token (hits) and decode step beside loads",
                  {"p50": "p50", "p99": "p99"}, x="case", unit="ms", rows=_hits, kind="across"),
            Panel(("offload.busy.g",), "first token beside a busy Python thread, p50",
                  {"quiet": "alone", "busy": "beside it"}, x="case", unit="ms", rows=_busy,
                  kind="across"),
            Panel(("offload.trace.g",), "28 conversations in turns: requests",
                  {"requests_per_s": ""}, x="tier", unit="requests/s", kind="bars"),
            Panel(("offload.trace.g",), "28 conversations in turns: first token",
                  {"first_token_ms_p50": "p50", "first_token_ms_p99": "p99"}, x="tier", unit="ms",
                  kind="bars"),
            Panel(("offload.pool.g",), "30 GiB of pinned memory at start",
                  {"serving_after_s": "engine serves", "all_after_s": "all of it is there"},
                  x="mode", unit="s", kind="bars"),
            Panel(("offload.spec.g",), "drafts and offload together",
                  {"off_tok_s": "without offload", "on_tok_s": "with offload"}, x="case",
                  unit="tokens/s", kind="across"),
        ),
    ),
    "cpu_offline": Picture(
        "CPU: decode over a plain read of the weights, prefill over oneDNN's product rate",
        "Through `LLM.generate`, against peers",
        (
            Panel(tuple(f"cpu_offline.{name}" for name in _CPU_OFFLINE), "",
                  {"ours": "hetero_llm", "peer": "peer"}, x="what", unit="of the run's own limit",
                  rows=_cpu_offline, kind="across", level=1.0),
        ),
    ),
    "ipex_decode": Picture(
        "68M shape, bf16, 2 threads: decoding by back end", "IPEX",
        (
            Panel(("ipex_decode.c",), "", {"tok/s": ""}, x="runner", unit="tokens/s",
                  by=("work",), kind="bars"),
        ),
    ),
    "demo_model": Picture(
        "Demo target on two threads", "Demo model",
        (
            Panel(("batch_vs_transformers.c", "batch_vs_transformers.g"), "16 prompts, bf16",
                  {"tokens_per_s": ""}, x="engine", unit="tokens/s", by=("machine",), kind="bars"),
            Panel(("prefix_hit.c", "prefix_hit.g"), "first token of 932",
                  {"first_token_ms": ""}, x="prompt", unit="ms", by=("machine",), kind="bars"),
            Panel(("engine_overhead.c", "engine_overhead.g"), "host's time a step, no model",
                  {"final_only_ms": "one output", "delta_stream_ms": "output for every token"},
                  unit="ms", by=("machine",), **_batch(log="xy")),
        ),
    ),
    "cpu_kernels": Picture(
        "CPU kernels on two threads", "Demo model",
        (
            Panel(("cpu_kernels.c",), "2-core CPU box", {"ours_us": "ours", "torch_us": "torch"},
                  x="kernel", unit="us", kind="across", log="y"),
            Panel(("cpu_kernels.g",), "H200 node's CPU", {"ours_us": "ours", "torch_us": "torch"},
                  x="kernel", unit="us", kind="across", log="y"),
        ),
    ),
    "guided_decode": Picture(
        "Decoding where every output follows a JSON schema",
        "Structured output",
        (
            Panel(("guided_decode.llama-3.1-8b.128256.g",), "Llama-3.1-8B shape",
                  {"unguided ms": "unguided", "guided ms": "guided", "noise ms": "noise",
                   "guided noise ms": "guided, noise"}, unit="ms", **_batch(kind="bars")),
            Panel(_all("guided_decode.S.*"), "68M shape, 2 threads",
                  {"unguided ms": "unguided", "guided ms": "guided", "noise ms": "noise",
                   "guided noise ms": "guided, noise", "torch sampler ms": "guided, torch sampler",
                   "forced drafts ms": "guided, forced tokens drafted"},
                  unit="ms", by=("machine",), **_batch(kind="bars")),
        ),
    ),
    "equal_tokens": Picture(
        "Share of requests with equal tokens, greedy, text without loops", "Without a draft model",
        (
            Panel(_all("equal_tokens.*"),
                  "drafts beside the plain run of their batch size, batch 8 beside batch 1",
                  {"equal": ""}, x="run", unit="of the requests", by=("machine", "dtype"),
                  kind="across"),
        ),
    ),
    "request_rates": Picture(
        "A server under rising load: requests at random times", "Server",
        (
            Panel(_all("request_rates.*"), "throughput", {"tok/s": "output tokens/s"}, x="rate",
                  x_label="requests/s", unit="output tokens/s", by=("model", "machine"), log="x"),
            Panel(_all("request_rates.*"), "first token",
                  {"first p50": "p50", "first p99": "p99"}, x="rate", x_label="requests/s",
                  unit="ms", by=("model", "machine"), log="xy"),
            Panel(_all("request_rates.*"), "gap between tokens",
                  {"gap p50": "p50", "gap p99": "p99"}, x="rate", x_label="requests/s",
                  unit="ms", by=("model", "machine"), log="xy"),
        ),
    ),
    "http_serving": Picture(
        "A server under load by open streams, 128 tokens out each (256 streams: 128 in,"
        " else 1,024)", "Server",
        (
            Panel(("http_serving.g",), "throughput",
                  {"tok/s": "hetero_llm", "offline tok/s": "its engine alone",
                   "vLLM tok/s": "vLLM 0.22.1, another run"}, x="streams", x_label="open streams",
                  unit="output tokens/s", log="xy"),
            Panel(("http_serving.g",), "first token, p50",
                  {"first p50": "hetero_llm", "vLLM first p50": "vLLM"}, x="streams",
                  x_label="open streams", unit="ms", log="xy"),
            Panel(("http_serving.g",), "gap between tokens",
                  {"gap p50": "p50", "gap p99": "p99", "vLLM gap p50": "vLLM p50",
                   "vLLM gap p99": "vLLM p99"}, x="streams", x_label="open streams", unit="ms",
                  log="xy"),
        ),
    ),
    "embeddings": Picture(
        "Embeddings of 160 texts, 6 layers of 384 in float32, one thread", "Server",
        (
            Panel(("embeddings.c",), "in one process", {"texts_per_cpu_s": "texts a CPU second"},
                  x="arm", unit="texts a CPU second", kind="across"),
            Panel(("embeddings.c",), "POST /v1/embeddings, one text a request",
                  {"p50_ms": "p50", "p99_ms": "p99"}, x="clients", x_label="clients", unit="ms",
                  rows="served", log="xy"),
        ),
    ),
    "server_idle": Picture(
        "200 one-token requests a second beside silent streams; loop of `AsyncLLMEngine`", "Server",
        (
            Panel(("server_idle.c",), "answers beside silent streams",
                  {"p50_ms": "p50", "p95_ms": "p95", "p99_ms": "p99", "max_ms": "max"},
                  x="idle_streams", x_label="silent streams", unit="ms", kind="bars"),
            Panel(("async_overhead.c",), "demo model, one engine thread",
                  {"llm_tokens_per_s": "LLM", "async_tokens_per_s": "AsyncLLMEngine"},
                  x="streams", x_label="streams", unit="tokens/s", kind="bars"),
        ),
    ),
}  # fmt: skip

ELSEWHERE = {
    "offload.ttft.g": "offload_ttft.png",
    "timeline.g": "timeline.png",
    "timeline.trace": "timeline.png",
}
"""Results file to the picture in docs/images that another script draws."""

NOT_DRAWN = {
    "clients": "a table of yes and no: docs/clients.md",
    "closed_batch.llama-3.1-8b": "two numbers, in docs/benchmarks.md",
    "expert_placement.c": "a table: docs/hybrid_experts.md",
    "hybrid_experts.g": "tables: docs/benchmarks.md",
    "attention.eight_bits.g": "a table: docs/benchmarks.md",
    "rooms/hybrid_experts.third_lane.g": "a table: docs/benchmarks.md",
    "rooms/hybrid_experts.hand_over.g": "a table: docs/benchmarks.md",
    "rooms/never_slower.cache.g": "three numbers: docs/history/log.md",
    "kernels_collectives.g": "a table: docs/benchmarks.md",
    "kernels_expert_team.g": "a table: docs/benchmarks.md",
    "tensor_parallel.llama-3.1-8b.g": "a table: docs/benchmarks.md",
    "sequence_parallel.llama-3.1-8b.g": "two numbers: docs/benchmarks.md",
    "pipeline_parallel.llama-3.1-8b.g": "seven numbers: docs/benchmarks.md",
    "guided_requests.llama-3.1-8b.g": "three numbers, in docs/benchmarks.md",
    "routing.c": "a table: docs/benchmarks.md",
    "perplexity.c": "a table: docs/quantization.md",
    "rounding.c": "a table: docs/benchmarks.md",
    "lora_decode.c": "a table: docs/lora.md",
    "cpu_offline.L.int4.c": "one ratio, in docs/quantization.md",
    "guided_pieces.c": "a sentence, in docs/benchmarks.md",
    "guided_requests.demo.c": "four numbers, in docs/benchmarks.md",
    "guided_fields.mistral-7b.g": "nine numbers, in docs/benchmarks.md",
    "api_routes.llama-3.1-8b.g": "a table: docs/benchmarks.md",
    "new_lengths.g": "two numbers, in docs/benchmarks.md",
    "rooms/never_slower.sampled.g": "a sentence, in docs/benchmarks.md",
    "any_prompt.c": "a table: docs/history/log.md",
    "offload.stores.g": "one number, in docs/benchmarks.md",
    "scaled_target.g": "a check that a scale-up model is built and served",
    "rooms/engine_overhead.before": "an earlier state, kept for comparison",
    "message_parsing.c": "one number says it: microseconds a token, the same for all formats",
    "rooms/engine_overhead.after": "an earlier state, kept for comparison",
    "rooms/engine_overhead.fewer_lines.before": "the same with 4,885 lines fewer",
    "rooms/engine_overhead.fewer_lines.after": "the same with 4,885 lines fewer",
    "rooms/lookahead_cache.fewer_lines.before": "the same with 4,885 lines fewer",
    "rooms/lookahead_cache.fewer_lines.after": "the same with 4,885 lines fewer",
    "rooms/lookahead_cache.before": "an earlier state, kept for comparison",
    "rooms/lookahead_cache.after": "an earlier state, kept for comparison",
    "rooms/host_gap.before": "an earlier state, kept for comparison",
    "rooms/host_gap.after": "an earlier state, kept for comparison",
    "rooms/kernels_pick.masks.before": "an earlier state, kept for comparison",
    "rooms/kernels_quantized_gemm.tuning": "what launches were chosen by, in the kernel's `choose`",
    "rooms/kernels_quantized_gemm.large": "as `.tuning`, of 128 rows",
    "rooms/kernels_quantized_gemm.fp4": "as `.tuning`, of fp4",
    "rooms/kernels_fp8_gemm": "as `.tuning`, of fp8 rows; a table: docs/benchmarks.md",
    "rooms/kernels_quantized_stack.tuning": "what launches of 8 bits were chosen by",
    "rooms/kernels_lora_row.tuning": "what launches with an adapter of one row were chosen by",
    "rooms/kernels_lora.experts.g": "a sentence of docs/history/log.md",
    "rooms/kernels_lora.many": "what ways of adding adapters to many rows were chosen by",
    "kernels_lora.g": "a table: docs/benchmarks.md",
    "kernels_expert_layouts.c": "a table: docs/design/hybrid_experts.md",
    "lora.llama-3.1-8b.g": "a table: docs/lora.md",
    "lora_cold.llama-3.1-8b.g": "a sentence: docs/lora.md",
    "lora_zipf.llama-3.1-8b.g": "a sentence: docs/lora.md",
    "moe_decode.qwen3-30b-a3b.g": "a table: docs/benchmarks.md",
    "rooms/guided_decode.masks.before": "an earlier state, kept for comparison",
    "rooms/hybrid_experts.before.g": "beside the later run, in docs/benchmarks.md",
    "rooms/kernels_expert_team.fp8_rows.g": "a line of docs/history/log.md",
    "rooms/never_slower.128.g": "two numbers, in docs/benchmarks.md",
    "rooms/never_slower.temperatures.g": "a sentence, in docs/benchmarks.md",
    "rooms/never_slower.account.g": "one arm beside earlier runs, in docs/benchmarks.md",
    "rooms/never_slower.net_gain.g": "two of the drafts alone, cut off by a limit",
    "rooms/skinny_gemm.two_rows.g": "what launches of few rows were chosen by",
    "rooms/verify.before": "an earlier state, kept for comparison",
    "rooms/verify.after": "an earlier state, kept for comparison",
    "rooms/verify.fewer_lines.g": "the same with 4,885 lines fewer",
}
"""Results file to the reason why no picture shows it."""
