"""GB/s at which the GPU computes a part of experts in host memory, alone and beside CPU threads.

    python -m bench.kernels.linked_experts [--kinds bf16 fp8] [--rows 1,8] [--shape qwen3-30b-a3b]
        [--share 0.33] [--threads 15] [--out FILE]

One layer after the other, in one graph, with random routes, all experts on the host: the last inner
rows of each, about `--share` of them, and that share of the experts whole. `us`: of a layer;
`gb_s`: bytes of its part, scales left out, over it; `of_link`: that as a share of a copy of
page-locked memory. `beside_gb_s`: the same while as many threads read other memory, and
`threads_gb_s`: what they read meanwhile; `dram_gb_s`: what they read alone. `error`: the largest
one of a layer against the reference in float32, over the largest value. `empty_us`: of a layer that
misses no expert.
"""

from __future__ import annotations

from functools import partial
from itertools import product
from typing import Any

import torch
from torch import Tensor

from bench.common import Rows, bench_parser, numbers, report
from bench.cpu_limits import ReadProbe
from bench.gpu_timing import capture, event_ms, largest_error, link_rate, need_cuda
from bench.kernels.expert_team import KINDS, SHAPES, Kind, Shape, fill_with_weights, layers_of
from hetero_llm.bridge.expert_mailbox import LINKED_UNIT, WHOLES, LinkPart
from hetero_llm.bridge.host_experts import HostExperts, HostLayer, HostMatrices
from hetero_llm.gpu.kernels.expert_requests import ON_HOST
from hetero_llm.gpu.kernels.linked_experts import linked_experts, linked_experts_reference
from hetero_llm.utils.topology import compute_cpus

_EXPERTS = 32
_BYTES = 2 << 30  # more than processors cache
_BESIDE_S = 1.5  # of replays that run beside the threads' reads


def host_of(shape: Shape, kind: Kind) -> HostExperts:
    """Layers in page-locked memory."""
    memory = torch.empty(_BYTES, dtype=torch.uint8, pin_memory=True)
    fill_with_weights(memory)

    def locked(part: HostMatrices) -> HostMatrices:
        if part.scale is None:
            return part
        scale = part.scale.pin_memory()
        return HostMatrices(part.kind, part.data, scale, part.group, part.scale_rows)

    host = layers_of(shape, kind, _EXPERTS, memory)
    layers = (HostLayer(locked(each.gate_up), locked(each.down)) for each in host.layers)
    return HostExperts(tuple(layers), host.activation)


def measure(
    shape: Shape,
    kind: Kind,
    host: HostExperts,
    *,
    rows: int,
    share: float,
    whole: bool,
    probe: ReadProbe,
    rates: dict[str, float],
) -> dict[str, Any]:
    """A line of the table."""
    units = max(1, round((1 - share) * shape.inner / LINKED_UNIT))
    part = LinkPart(rows=shape.inner - units * LINKED_UNIT)
    if whole:
        part = LinkPart(whole=round(share * WHOLES))
    routes = [_routes(shape, rows) for _ in host.layers]
    counts = [ids.unique().numel() for _, ids, _ in routes]
    used = sum(n * part.whole // WHOLES if whole else n for n in counts)
    inner = part.rows or shape.inner
    size = used * 3 * shape.hidden * inner * kind.bits / 8
    compute = partial(linked_experts, part=part, activation="silu")
    slots = torch.full((rows, shape.chosen), ON_HOST, dtype=torch.int32, device="cuda")

    def run(slots: Tensor) -> None:
        for layer, (x, ids, weights) in zip(host.layers, routes, strict=True):
            compute(x, ids, weights, slots, layer)

    graph = capture(partial(run, slots))
    ms = event_ms(graph.replay)
    empty = event_ms(capture(partial(run, torch.zeros_like(slots))).replay)
    beside, threads = _beside(graph, ms, probe)
    x, ids, weights = routes[0]
    given = (x, ids, weights, slots, host.layers[0])
    wanted = linked_experts_reference(*given, part=part, activation="silu")
    count = len(host.layers)
    return {
        "rows": rows, "inner": inner, "experts": used / count, "us": 1e3 * ms / count,
        "gb_s": size / ms / 1e6, "of_link": size / ms / 1e6 / rates["link"],
        "beside_gb_s": size / beside / 1e6, "threads_gb_s": threads, "dram_gb_s": rates["dram"],
        "empty_us": 1e3 * empty / count, "error": largest_error(compute(*given), wanted),
    }  # fmt: skip


def _routes(shape: Shape, rows: int) -> tuple[Tensor, Tensor, Tensor]:
    x = torch.randn(rows, shape.hidden, device="cuda").to(torch.bfloat16)
    ids = torch.rand(rows, _EXPERTS, device="cuda").topk(shape.chosen, dim=1).indices
    weights = torch.full((rows, shape.chosen), 1 / shape.chosen, device="cuda")
    return x, ids.to(torch.int32).contiguous(), weights


def _beside(graph: torch.cuda.CUDAGraph, ms: float, probe: ReadProbe) -> tuple[float, float]:
    """Milliseconds of a replay while threads read, and their GB/s."""
    replays = max(2, int(_BESIDE_S * 1e3 / ms))
    events = [torch.cuda.Event(enable_timing=True) for _ in range(2)]
    events[0].record()
    for _ in range(replays):
        graph.replay()
    events[1].record()
    threads = probe.gigabytes_per_s(3)
    # Reads that end before the replays do let the last ones run alone: read on.
    while not events[1].query():
        probe.gigabytes_per_s(1)
    return events[0].elapsed_time(events[1]) / replays, threads


def main() -> None:
    parser = bench_parser(__doc__)
    parser.add_argument("--shape", choices=SHAPES, default="qwen3-235b-a22b")
    parser.add_argument("--kinds", nargs="+", choices=KINDS, default=["bf16", "fp8", "int4", "fp4"])
    parser.add_argument("--rows", type=numbers, default=[1, 8], help="comma-separated")
    parser.add_argument("--share", type=float, default=1 / 3, help="of an expert's inner rows")
    parser.add_argument("--threads", type=int, default=max(1, len(compute_cpus(reserve=0)) - 1))
    args = parser.parse_args()
    need_cuda()
    table: Rows = []
    with torch.inference_mode(), ReadProbe(1 << 30, args.threads) as probe:
        rates = {"link": link_rate() / 1e9, "dram": probe.gigabytes_per_s(3)}
        for name in args.kinds:
            shape, kind = SHAPES[args.shape], KINDS[name]
            host = host_of(shape, kind)
            for rows, whole in product(args.rows, (False, True)):
                line = measure(
                    shape, kind, host,
                    rows=rows, share=args.share, whole=whole, probe=probe, rates=rates,
                )  # fmt: skip
                table.append({"kind": name, **line})
    about = {"shape": args.shape, "share": args.share, "threads": args.threads, "rates": rates}
    report("kernels_linked_experts", about, table, args.out)


if __name__ == "__main__":
    main()
