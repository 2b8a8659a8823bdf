"""Which roundings of 8 bits cost a model how much, on a CPU.

Prompts on a GPU multiply weights in 8 bits with rows that are rounded to 8 bits, too. Each row of
the table rounds a part of that alone, over the texts of `bench.engine.perplexity`:

    weights     kinds of products whose weights are rounded: qkv, out, gate_up, down, head
    rows        kinds of products whose inputs are; "L3": all of that layer
    columns     of a row that share a scale; 0: all
    flops       share of a prompt's products (without attention and head) whose inputs are rounded

--formats fp8,ifq; the weights are rounded as while loading. Columns behind these: perplexity, its
change with the half width of a 95% interval over the texts, KL from float32 in nats.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from bench.common import Rows, bench_parser, names_of, say, write_results
from bench.engine.perplexity import (
    load,
    log_probabilities,
    measure,
    measured_texts,
    rounded_rows,
)
from hetero_llm.demo_models import demo_folder
from hetero_llm.models.layers import CausalLM, Linear
from hetero_llm.quantization.matrix import dequantize
from hetero_llm.quantization.online import quantize_fp8, quantize_int8

KINDS = {"fp8": "fp8", "ifq": "int8"}
QUANTIZERS = {"fp8": quantize_fp8, "int8": quantize_int8}
PRODUCTS = {
    "qkv": "qkv_proj",
    "out": "out_proj",
    "gate_up": "gate_up_proj",
    "down": "down_proj",
    "head": "lm_head",
}
LAYERS = tuple(name for name in PRODUCTS if name != "head")


@dataclass(frozen=True, slots=True)
class Case:
    """One row of the table; see the head of this file. `layer`: the only one whose rows are
    rounded; None: all."""

    weights: tuple[str, ...]
    rows: tuple[str, ...]
    columns: int = 0
    layer: int | None = None


def cases(layers: int) -> list[Case]:
    """What is measured, for a model of so many layers."""
    without = [tuple(name for name in LAYERS if name != left) for left in LAYERS]
    return [
        Case(LAYERS, ()),
        Case((), LAYERS),
        Case(LAYERS, LAYERS),
        Case(LAYERS, LAYERS, 128),
        Case((*LAYERS, "head"), (*LAYERS, "head")),
        *(Case((name,), ()) for name in PRODUCTS),
        *(Case(LAYERS, (name,)) for name in LAYERS),
        *(Case(LAYERS, (name,), 128) for name in LAYERS),
        *(Case(LAYERS, rows) for rows in without),
        Case(LAYERS, ("qkv", "gate_up")),
        Case(LAYERS, ("out", "down")),
        *(Case(LAYERS, LAYERS, layer=layer) for layer in range(layers)),
    ]


def products(model: CausalLM) -> Mapping[str, tuple[str, int, Linear]]:
    """The kind and the layer of each product, by its name; the head's layer is -1."""
    found = {}
    for name, module in model.named_modules():
        for kind, last in PRODUCTS.items():
            if isinstance(module, Linear) and name.endswith(last):
                layer = -1 if kind == "head" else int(name.split(".")[1])
                found[name] = kind, layer, module
    return found


class Prepare:
    """Rounds weights and rows of a plain model as a case says.

    Args:
        kind: of the elements: "fp8" or "int8".
    """

    def __init__(self, model: CausalLM, kind: str) -> None:
        self._kind, self._products = kind, products(model)
        self._plain = {name: one.weight for name, (_, _, one) in self._products.items()}
        self._rounded = {
            name: nn.Parameter(dequantize(QUANTIZERS[kind](weight), weight.dtype), False)
            for name, weight in self._plain.items()
        }
        self._hooks: list[RemovableHandle] = []

    def __call__(self, case: Case) -> float:
        """Returns the share of the layers' flops whose rows are rounded."""
        for hook in self._hooks:
            hook.remove()
        self._hooks.clear()
        flops = {True: 0, False: 0}
        for name, (kind, layer, module) in self._products.items():
            weight = (self._rounded if kind in case.weights else self._plain)[name]
            module.weight = weight  # not copied: a tied head's is the embedding's, too
            rounds = kind in case.rows and case.layer in (None, layer)
            if kind != "head":
                flops[rounds] += weight.numel()
            if rounds:
                self._hooks.append(module.register_forward_pre_hook(self._hook(case.columns)))
        return flops[True] / sum(flops.values())

    def _hook(self, columns: int) -> Callable[[nn.Module, tuple[Tensor]], Tensor]:
        def hook(module: nn.Module, inputs: tuple[Tensor]) -> Tensor:
            x = inputs[0]
            return rounded_rows(x, self._kind, columns or x.shape[1])

        return hook


def main() -> None:
    parser = bench_parser(__doc__)
    parser.add_argument("--formats", type=names_of(tuple(KINDS)), default=list(KINDS))
    parser.add_argument("--texts", type=int, default=48, help="to measure with")
    options = parser.parse_args()
    texts = measured_texts(options.texts)
    model = load(demo_folder("demo"), torch.float32)
    layers = 1 + max(layer for _, layer, _ in products(model).values())
    reference = list(log_probabilities(model, texts))
    base = measure(model, reference, texts)
    results: Rows = []
    for name in options.formats:
        prepare = Prepare(model, KINDS[name])
        for case in cases(layers):
            flops = prepare(case)
            found = measure(model, reference, texts)
            change, half = found.change_percent(base)
            rows = "+".join(case.rows) if case.layer is None else f"L{case.layer}"
            results.append({
                "format": name, "weights": "+".join(case.weights), "rows": rows,
                "columns": case.columns, "flops": flops, "perplexity": found.perplexity,
                "change_percent": change, "half_interval": half, "kl": found.kl,
            })  # fmt: skip
            say(results[-1])
        prepare(Case((), ()))
    about = {"model": "demo", "texts": len(texts), "base_perplexity": base.perplexity}
    write_results("rounding.c", {**about, "rows": results}, options.out)


if __name__ == "__main__":
    main()
