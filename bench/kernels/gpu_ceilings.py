"""What the card can do: matrix products at prefill sizes and the linear stack of a decode step.

    python -m bench.kernels.gpu_ceilings [--out FILE]

Llama-3.1-8B shape, bf16, cuBLAS through torch. The stack is one captured graph of 32 layers and
the head, chained as in the model, without anything between the products.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F

from bench.common import Rows, bench_parser, print_table, write_results
from bench.gpu_timing import copy_bandwidth, event_ms, graph_ms

LAYERS, HIDDEN, INNER, QKV, VOCAB = 32, 4096, 14336, 6144, 128256


def weights() -> tuple[list[list[torch.Tensor]], torch.Tensor]:
    """The four matrices of each layer, and the head."""

    def matrix(rows: int, columns: int) -> torch.Tensor:
        return torch.empty(rows, columns, dtype=torch.bfloat16, device="cuda").normal_(0, 0.02)

    sizes = ((QKV, HIDDEN), (HIDDEN, HIDDEN), (2 * INNER, HIDDEN), (HIDDEN, INNER))
    layers = [[matrix(*size) for size in sizes] for _ in range(LAYERS)]
    return layers, matrix(VOCAB, HIDDEN)


def stack(layers: list[list[torch.Tensor]], head: torch.Tensor | None, x: torch.Tensor) -> None:
    for qkv, out, gate_up, down in layers:
        x = F.linear(F.linear(x, qkv)[:, :HIDDEN], out)
        x = F.linear(F.linear(x, gate_up)[:, :INNER], down)
    if head is not None:
        F.linear(x, head)


def main() -> None:
    args = bench_parser(__doc__).parse_args()
    layers, head = weights()
    rows: Rows = []
    for count in (1, 4, 8, 16, 32, 64, 128, 256, 512):
        x = torch.randn(count, HIDDEN, dtype=torch.bfloat16, device="cuda")
        rows.append({"rows": count, "stack ms": graph_ms(lambda x=x: stack(layers, head, x))})
    print_table(rows)
    big: Rows = []
    for count in (1024, 2048, 4096, 8192, 16384):
        x = torch.randn(count, HIDDEN, dtype=torch.bfloat16, device="cuda")
        ms = event_ms(lambda x=x: stack(layers, None, x), replays=3)
        flops = 2 * count * LAYERS * sum(w.numel() for w in layers[0])
        big.append({"rows": count, "layers ms": ms, "TFLOP/s": flops / ms / 1e9})
    print_table(big)
    copy = copy_bandwidth()
    print(f"copy {copy:.2f} TB/s")
    results = {"copy_tb_s": copy, "decode_stack": rows, "prefill_layers": big}
    write_results("gpu_ceilings", results, args.out)


if __name__ == "__main__":
    main()
