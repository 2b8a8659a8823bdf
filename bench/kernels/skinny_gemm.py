"""Products of few rows: our kernels against the library, one by one and as the stack of a step.

Weights are random and as many as the model's, so that none is in L2 when it is read. Everything is
timed in CUDA graphs. The stack is the chain of all linear layers of one step, each fed with the
output of the one before.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch
import torch.nn.functional as F
import triton
from torch import Tensor

from bench.common import Rows, bench_parser, print_table, write_results
from bench.gpu_timing import largest_error, need_cuda, queued_us
from hetero_llm.gpu.kernels.launch import Launch
from hetero_llm.gpu.kernels.skinny_gemm import SkinnyConfig, choose, plan_launch

ROWS = (1, 2, 4, 8, 16, 32, 64)
L2_BYTES = 60e6
Shape = tuple[int, int]  # features, inputs
Cell = tuple[int, Shape]  # rows, shape


@dataclasses.dataclass(frozen=True)
class Dims:
    """Sizes of a model's linear layers; `qkv` counts the features of q, k and v together."""

    hidden: int
    inner: int
    qkv: int
    vocab: int
    layers: int

    def shapes(self) -> dict[str, Shape]:
        return {
            "qkv": (self.qkv, self.hidden),
            "o": (self.hidden, self.hidden),
            "gate_up": (2 * self.inner, self.hidden),
            "down": (self.hidden, self.inner),
            "head": (self.vocab, self.hidden),
        }


MODELS = {
    "llama-3.1-8b": Dims(4096, 14336, 6144, 128256, 32),
    "mistral-7b": Dims(4096, 14336, 6144, 32000, 32),
    "qwen2.5-7b": Dims(3584, 18944, 4608, 152064, 28),
    "llama-3.2-1b": Dims(2048, 8192, 3072, 128256, 16),
}


def vector_candidates(k: int) -> list[SkinnyConfig]:
    """Configurations of the vector kernel; 256 inputs a warp."""

    def of(block_n: int, warps: int, **more: Any) -> SkinnyConfig:
        return SkinnyConfig(1, block_n, 256 * warps, num_warps=warps, **more)

    wide = 4 if k % 1024 == 0 else 2
    return [
        *(of(8, wide, prefetch=prefetch) for prefetch in (0, 1024, 2048)),
        *(of(4, wide, prefetch=prefetch) for prefetch in (0, 1024)),
        of(8, wide, prefetch=1024, evict_first=False),
        of(16, wide),
        of(8, 2, prefetch=512),
        of(4, 8, prefetch=1024),
        of(8, 1, prefetch=512),
        of(8, wide, split_k=2),
    ]


def vector_rows_candidates(m: int, k: int) -> list[SkinnyConfig]:
    """Configurations of the vector kernel for a few rows; 256 inputs a warp."""
    rows, wide = triton.next_power_of_2(m), 4 if k % 1024 == 0 else 2
    return [
        SkinnyConfig(rows, features, 256 * warps, num_warps=warps, prefetch=prefetch, vector=True)
        for features in (2, 4, 8)
        if features * rows <= 32
        for warps, prefetch in ((wide, 0), (wide, 1024), (2, 0))
    ]


def matrix_candidates(m: int, n: int) -> list[SkinnyConfig]:
    """Configurations of the tensor-core kernel, with splits that give each multiprocessor work."""
    block_m = next(size for size in (8, 16, 32, 64) if m <= size)
    # Features and inputs of a tile, stages, warps.
    few = [(32, 256, 4, 4), (16, 512, 4, 4), (32, 128, 6, 4), (64, 128, 5, 4), (32, 256, 6, 4)]
    more = [(32, 256, 3, 4), (64, 128, 4, 4), (64, 64, 6, 4), (128, 64, 5, 4), (128, 128, 3, 8)]
    configs = []
    for block_n, block_k, stages, warps in few if block_m <= 16 else more:
        tiles = triton.cdiv(n, block_n)
        splits = [split for split in (1, 2, 4, 8) if tiles * split >= 100][:2]
        for split in splits[:1] if tiles > 400 else splits:
            configs.append(SkinnyConfig(block_m, block_n, block_k, split, warps, stages))
    return [dataclasses.replace(configs[0], prefetch=1024), *configs]


def candidates(m: int, n: int, k: int) -> list[SkinnyConfig]:
    """Everything worth timing for one product, what `choose` says included."""
    configs = matrix_candidates(m, n)
    if m == 1:
        configs = vector_candidates(k) + configs[:3]
    elif m <= 8:
        configs = vector_rows_candidates(m, k) + configs
    chosen = choose(m, n, k)
    if chosen is not None:
        configs.append(chosen)
    return [c for c in dict.fromkeys(configs) if c.fits(m, n, k)]


def compile_all(launches: list[Launch]) -> int:
    """Compiles the kernels of `launches` side by side; returns how many there are."""
    distinct = {(launch.kernel, *sorted(launch.options.items())): launch for launch in launches}
    with ThreadPoolExecutor(16) as pool, triton.AsyncCompileMode(pool):
        for launch in distinct.values():
            launch.kernel.warmup(*launch.arguments, grid=launch.grid, **launch.options)
    return len(distinct)


def without_pdl(launch: Launch) -> Launch:
    off = {"PDL": False, "launch_pdl": False, "PREFETCH": 0, "PIECES": 1}
    return dataclasses.replace(launch, options={**launch.options, **off})


def rows_like(shape: Shape, m: int) -> tuple[Tensor, Tensor]:
    """Input and output of a product of m rows."""
    n, k = shape
    x = torch.randn(m, k, device="cuda", dtype=torch.bfloat16)
    return x, torch.empty(m, n, device="cuda", dtype=torch.bfloat16)


def time_cell(weights: list[Tensor], m: int, configs: list[SkinnyConfig]) -> dict[str, Any]:
    """One product: the library's time and error, and those of each configuration."""
    n, k = weights[0].shape
    x, y = rows_like((n, k), m)
    # Between two uses of a weight lie more bytes than L2 holds; no more than 1 GB a replay.
    copies = max(1, min(len(weights), int(1e9) // (2 * n * k)))
    assert len(weights) == 1 or copies * 2 * n * k > 2 * L2_BYTES
    used = weights[:copies]
    exact = F.linear(x.float(), weights[0].float())
    cell: dict[str, Any] = {
        "library_error": largest_error(F.linear(x, weights[0]), exact),
        "library_us": queued_us(lambda: [F.linear(x, w) for w in used]) / copies,
        "configs": {},
    }
    for config in configs:
        launches = [plan_launch(x, w, None, y=y, config=config) for w in used]
        y.zero_()
        launches[0]()
        wrong = largest_error(y, exact)
        us = queued_us(lambda launches=launches: [launch() for launch in launches]) / copies
        cell["configs"][config] = {"us": us, "error": wrong}
    return cell


class Stack:
    """All linear layers of one step over fixed buffers."""

    def __init__(self, dims: Dims, weights: dict[str, list[Tensor]], m: int) -> None:
        self.dims, self.weights, self.m = dims, weights, m
        self.buffers = {name: rows_like(shape, m)[1] for name, shape in dims.shapes().items()}
        self.start = torch.randn(m, dims.hidden, device="cuda", dtype=torch.bfloat16)

    def products(self) -> list[tuple[Shape, Tensor, Tensor, Tensor]]:
        """Shape, input, weight and output of each product, in order."""
        hidden, inner, buffers = self.dims.hidden, self.dims.inner, self.buffers
        inputs = {
            "qkv": buffers["down"],
            "o": buffers["qkv"][:, :hidden],
            "gate_up": buffers["o"],
            "down": buffers["gate_up"][:, :inner],
        }
        shapes = self.dims.shapes()
        steps = [
            (shapes[name], inputs[name], self.weights[name][layer], buffers[name])
            for layer in range(self.dims.layers)
            for name in ("qkv", "o", "gate_up", "down")
        ]
        steps[0] = (steps[0][0], self.start, *steps[0][2:])
        head = (shapes["head"], buffers["down"], self.weights["head"][0], buffers["head"])
        return [*steps, head]

    def calls(
        self, configs: dict[Shape, SkinnyConfig | None], *, pdl: bool = True
    ) -> list[Callable[[], Any]]:
        """The step's calls, by shape with our kernel or, for None, the library's."""
        calls: list[Callable[[], Any]] = []
        for shape, x, weight, y in self.products():
            config = configs[shape]
            if config is None:
                calls.append(lambda x=x, weight=weight, y=y: torch.mm(x, weight.t(), out=y))
            else:
                launch = plan_launch(x, weight, None, y=y, config=config)
                calls.append(launch if pdl else without_pdl(launch))
        return calls

    def milliseconds(self, configs: dict[Shape, SkinnyConfig | None], *, pdl: bool = True) -> float:
        calls = self.calls(configs, pdl=pdl)
        return queued_us(lambda: [call() for call in calls]) / 1e3


def stack_row(stack: Stack, cells: dict[Cell, dict[str, Any]]) -> dict[str, Any]:
    """One line of the table of stacks: the library, ours, and the best of both, in ms."""
    m = stack.m
    shapes = list(stack.dims.shapes().values())
    best = {shape: best_of(cells[m, shape]) for shape in shapes}
    mixed = {
        shape: best[shape] if best_us(cells[m, shape]) < cells[m, shape]["library_us"] else None
        for shape in shapes
    }
    return {
        "rows": m,
        "library_ms": stack.milliseconds(dict.fromkeys(shapes)),
        "ours_ms": stack.milliseconds(dict(best)),
        "ours_without_pdl_ms": stack.milliseconds(dict(best), pdl=False),
        "faster_of_both_ms": stack.milliseconds(mixed),
        "linear_ms": stack.milliseconds({shape: choose(m, *shape) for shape in shapes}),
    }


def uniform_rows(stack: Stack) -> Rows:
    """The stack of one row with one configuration everywhere, where it fits everywhere."""
    shapes = list(stack.dims.shapes().values())
    common = [c for c in vector_candidates(1024) if all(c.fits(1, *shape) for shape in shapes)]
    return [
        {"config": label(c), "ms": stack.milliseconds(dict.fromkeys(shapes, c))} for c in common
    ]


def best_of(cell: dict[str, Any]) -> SkinnyConfig:
    return min(cell["configs"], key=lambda config: cell["configs"][config]["us"])


def best_us(cell: dict[str, Any]) -> float:
    return cell["configs"][best_of(cell)]["us"]


def label(config: SkinnyConfig | None) -> str:
    if config is None:
        return "library"
    parts = [
        *(
            "vector" if config.vector else "",
            f"m{config.block_m}",
            f"n{config.block_n}",
            f"k{config.block_k}",
        ),
        *(f"split{config.split_k}", f"warps{config.num_warps}", f"stages{config.num_stages}"),
        *(f"pre{config.prefetch}", "" if config.evict_first else "keep"),
    ]
    return " ".join(part for part in parts if part)


def cell_row(name: str, m: int, shape: Shape, cell: dict[str, Any]) -> dict[str, Any]:
    def terabytes(us: float) -> float:
        return 2e-6 * shape[0] * shape[1] / us

    chosen = choose(m, *shape)
    ours = best_us(cell)
    return {
        "layer": name,
        "rows": m,
        "library_us": cell["library_us"],
        "TB/s": terabytes(cell["library_us"]),
        "best_us": ours,
        "best TB/s": terabytes(ours),
        "linear_us": cell["library_us"] if chosen is None else cell["configs"][chosen]["us"],
        "best": label(best_of(cell)),
    }


def plan_compilations(
    cells: dict[Cell, list[SkinnyConfig]], weights: dict[Shape, Tensor]
) -> list[Launch]:
    """One launch for each product and configuration."""
    launches = []
    for (m, shape), configs in cells.items():
        x, y = rows_like(shape, m)
        launches += [plan_launch(x, weights[shape], None, y=y, config=c) for c in configs]
    return launches


def main() -> None:
    parser = bench_parser(__doc__)
    parser.add_argument("--shape", choices=MODELS, default="llama-3.1-8b")
    parser.add_argument("--rows", type=int, nargs="+", default=ROWS)
    args = parser.parse_args()
    need_cuda()
    dims = MODELS[args.shape]
    shapes = dims.shapes()
    weights = {
        name: [
            torch.empty(n, k, device="cuda", dtype=torch.bfloat16).normal_(std=k**-0.5)
            for _ in range(1 if name == "head" else dims.layers)
        ]
        for name, (n, k) in shapes.items()
    }
    plan = {(m, shape): candidates(m, *shape) for m in args.rows for shape in shapes.values()}
    launches = plan_compilations(plan, {shapes[name]: w[0] for name, w in weights.items()})
    compiled = compile_all(launches)
    names = {shape: name for name, shape in shapes.items()}
    cells = {
        (m, shape): time_cell(weights[names[shape]], m, configs)
        for (m, shape), configs in plan.items()
    }
    best = {key: [best_of(cell)] for key, cell in cells.items()}
    plain = plan_compilations(best, {shapes[name]: w[0] for name, w in weights.items()})
    compiled += compile_all([without_pdl(launch) for launch in plain])
    stacks = [stack_row(Stack(dims, weights, m), cells) for m in args.rows]
    uniform = uniform_rows(Stack(dims, weights, 1))
    rows = [cell_row(names[shape], m, shape, cell) for (m, shape), cell in cells.items()]
    worst = max(value["error"] for cell in cells.values() for value in cell["configs"].values())
    detail = [
        {"layer": names[shape], "rows": m, "config": dataclasses.asdict(config), **value}
        for (m, shape), cell in cells.items()
        for config, value in cell["configs"].items()
    ]
    results = {
        "shape": args.shape,
        "products": rows,
        "stacks": stacks,
        "one_configuration_at_one_row": uniform,
        "worst_error": worst,
        "configurations": detail,
    }
    write_results(f"small_linear_{args.shape}", results, args.out)
    print(f"{args.shape}: {compiled} kernels; largest error over largest value {worst:.2g}")
    print_table(rows)
    print_table(uniform)
    print_table(stacks)
    if not worst < 1e-2:
        raise SystemExit("a kernel is wrong")


if __name__ == "__main__":
    main()
