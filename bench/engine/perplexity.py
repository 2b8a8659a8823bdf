"""Perplexity of a model with quantized weights over the same model in float32, on a CPU.

Texts: every sixth of the demo pair's held-out ones, its first 512 tokens; with --calibration
heldout the calibrated formats see the first 512 tokens of the others. KL: mean divergence of the
next token's distribution from float32's, in nats, which is less noisy than the perplexity.
--rows 8: products round their inputs, too, as those of many rows do on a GPU (fp8, fp8_block, ifq).

Columns: format, calibration, bits of rows, bytes of the weight files, perplexity, its change with
the half width of a 95% interval over the texts, KL.
"""

from __future__ import annotations

import math
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from bench.common import Rows, bench_parser, names_of, say, write_results
from hetero_llm.commands.calibration_text import TEXT_TOKENS, sample_texts
from hetero_llm.demo_models import demo_folder, heldout_prompts
from hetero_llm.models.calibration import WholeTexts
from hetero_llm.models.layers import CausalLM, Linear
from hetero_llm.models.loader import load_model
from hetero_llm.models.quantized_writer import write_quantized
from hetero_llm.models.read_config import load_model_config
from hetero_llm.quantization.names import ONLINE_NAMES

CALIBRATIONS = ("none", "self", "heldout")
ROWS = ("16", "8")
IN_8_BITS = ("fp8", "fp8_block", "ifq")
EVERY = 6
TEXTS_AT_ONCE = 8


def load(folder: Path, dtype: torch.dtype) -> CausalLM:
    """The model of a folder on the CPU."""
    config = load_model_config(folder)
    return load_model(folder, config, dtype=dtype, device="cpu", show_progress=False)


def rounded_rows(x: Tensor, kind: str, group: int) -> Tensor:
    """[M, K] in "fp8" or "int8" and back, with a scale for each `group` columns of a row."""
    columns = x.shape[1]
    groups = F.pad(x, (0, -columns % group)).unflatten(1, (-1, group))
    peaks = groups.abs().amax(2, keepdim=True).clamp_min(1e-30)
    if kind == "fp8":
        scale = peaks / 448.0
        codes = (groups / scale).to(torch.float8_e4m3fn).float()
    else:
        scale = peaks / 127.0
        codes = (groups / scale + 0.5).floor()
    return (codes * scale).flatten(1)[:, :columns]


def round_rows(model: CausalLM) -> None:
    """From now on products with quantized weights round their inputs."""

    def hook(module: nn.Module, inputs: tuple[Tensor]) -> Tensor:
        assert isinstance(module, Linear) and module.quantized is not None
        matrix = module.quantized
        return rounded_rows(inputs[0], matrix.kind, matrix.group)

    for module in model.modules():
        if isinstance(module, Linear) and module.quantized is not None:
            module.register_forward_pre_hook(hook)


@torch.no_grad()
def log_probabilities(model: CausalLM, texts: Tensor) -> Iterator[Tensor]:
    """[S, L - 1, vocab] float32 of the next token, some texts at a time."""
    length = texts.shape[1]
    attend = WholeTexts(model.config, length)
    for some in texts.split(TEXTS_AT_ONCE):
        positions = torch.arange(length).repeat(len(some))
        hidden = model(some.flatten(), positions, attend)
        logits = model.logits(hidden).float().view(len(some), length, -1)
        yield logits[:, :-1].log_softmax(-1)


@dataclass(frozen=True, slots=True)
class Measured:
    """What `measure` finds.

    Attributes:
        losses: [S] float64, mean of each text in nats.
        kl: mean divergence from the reference in nats.
    """

    losses: Tensor
    kl: float

    @property
    def perplexity(self) -> float:
        return math.exp(float(self.losses.mean()))

    def change_percent(self, base: Measured) -> tuple[float, float]:
        """Change of the perplexity over that of `base`, and half of its 95% interval: the texts are
        of one length and measured in pairs, so their differences have a normal mean."""
        differences = self.losses - base.losses
        mean = float(differences.mean())
        error = (
            float(differences.std()) / math.sqrt(len(differences)) if len(differences) > 1 else 0
        )
        return math.expm1(mean) * 100, 1.96 * error * math.exp(mean) * 100


def measure(model: CausalLM, reference: list[Tensor], texts: Tensor) -> Measured:
    """The model over the texts; `reference`: what `log_probabilities` gave for them."""
    losses, divergence = [], 0.0
    parts = texts.split(TEXTS_AT_ONCE)
    for found, wanted, some in zip(log_probabilities(model, texts), reference, parts, strict=True):
        losses.append(-found.gather(2, some[:, 1:, None]).double().mean((1, 2)))
        divergence += (wanted.exp() * (wanted - found)).double().sum().item()
    return Measured(torch.cat(losses), divergence / texts[:, 1:].numel())


def measured_texts(count: int) -> Tensor:
    """[count, TEXT_TOKENS] int64, every sixth of the held-out texts."""
    return _heldout()[::EVERY][:count]


def _heldout() -> Tensor:
    return torch.from_numpy(heldout_prompts().prompts[:, :TEXT_TOKENS].astype("int64"))


def main() -> None:
    parser = bench_parser(__doc__)
    parser.add_argument("--formats", type=names_of(ONLINE_NAMES), default=list(ONLINE_NAMES))
    parser.add_argument(
        "--calibration", type=names_of(CALIBRATIONS), default=list(CALIBRATIONS[:2])
    )
    parser.add_argument("--rows", type=names_of(ROWS), default=["16"], help="bits of inputs")
    parser.add_argument("--tokens", type=int, default=65536, help="to calibrate with")
    parser.add_argument("--texts", type=int, default=48, help="to measure with")
    options = parser.parse_args()
    folder = demo_folder("demo")
    texts = measured_texts(options.texts)
    plain = load(folder, torch.float32)
    reference = list(log_probabilities(plain, texts))
    results: Rows = []
    first: list[Measured] = []

    def report(
        name: str, calibration: str, model: CausalLM, size: int, seconds: float, bits: str = "16"
    ) -> None:
        found = measure(model, reference, texts)
        first.append(found)
        change, half = found.change_percent(first[0])
        results.append({
            "format": name, "calibration": calibration, "rows": bits, "bytes": size,
            "perplexity": found.perplexity, "change_percent": change, "half_interval": half,
            "kl": found.kl, "seconds": seconds,
        })  # fmt: skip
        say(results[-1])

    def size_of(path: Path) -> int:
        return sum(file.stat().st_size for file in path.glob("*.safetensors"))

    report("float32", "none", plain, size_of(folder), 0.0)
    report("bfloat16", "none", load(folder, torch.bfloat16), size_of(folder), 0.0)
    for calibration in options.calibration:
        sample = None
        if calibration == "heldout":
            rows = _heldout()
            others = torch.arange(len(rows)) % EVERY != 0
            sample = rows[others][: options.tokens // TEXT_TOKENS]
        if calibration == "self":
            sample = sample_texts(
                folder, device="cpu", tokens=options.tokens, seed=0, allow_pickle=False
            )
        for name in options.formats:
            with tempfile.TemporaryDirectory() as out:
                begin = time.perf_counter()
                write_quantized(folder, Path(out), name, device="cpu", texts=sample)
                seconds = time.perf_counter() - begin
                model = load(Path(out), torch.float32)
                size = size_of(Path(out))
                for bits in sorted(options.rows):
                    if bits == "8":
                        if name not in IN_8_BITS:
                            continue
                        round_rows(model)
                    report(name, calibration, model, size, seconds, bits)
    about = {"model": "demo", "texts": len(texts), "tokens": options.tokens}
    write_results("perplexity.c", {**about, "rows": results}, options.out)


if __name__ == "__main__":
    main()
