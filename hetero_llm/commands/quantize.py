"""`hetero-llm quantize`: a copy of a model whose weights are stored quantized."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from hetero_llm.commands.console import Finish
from hetero_llm.commands.options import add_source_flags, model_folder
from hetero_llm.core.errors import ConfigError

if TYPE_CHECKING:
    from torch import Tensor

    from hetero_llm.models.config import ModelConfig

_FORMATS = ("fp8", "fp8_block", "ifq", "ifq_nf4", "int4")
_OF_4_BITS = ("ifq_nf4", "int4")
_SELF, _NONE = "self", "none"
_TOKENS = 65536


def add_quantize(parser: argparse.ArgumentParser, finish: Finish) -> None:
    """Fills the parser of `quantize`."""
    parser.add_argument(
        "model", metavar="MODEL", help="folder or Hugging Face name of the model, or 'demo'"
    )
    parser.add_argument("out", metavar="OUT", help="folder to write, new or empty")
    parser.add_argument(
        "--format",
        choices=_FORMATS,
        required=True,
        help="as of --quantization: 'fp8' has a scale for each row, 'fp8_block' for each "
        "128 x 128, 'ifq' is int8, 'int4' has a scale for each 128 columns, or 64 or 32 where 128 "
        "do not divide those of all matrices; 'ifq_nf4' is written "
        "as bitsandbytes, all others as compressed-tensors",
    )
    parser.add_argument(
        "--calibration",
        metavar="FILE",
        default=None,
        help="text that tells which errors of weights count (GPTQ): a text file, or .jsonl with a "
        "'text' in each line; 'self': text that the model samples itself, seeded; 'none': each "
        "matrix is rounded by itself. Default: 'self' for formats of 4 bits, else 'none'",
    )
    parser.add_argument(
        "--calibration-tokens",
        metavar="N",
        type=int,
        default=_TOKENS,
        help="tokens to calibrate with, at most (default: %(default)s)",
    )
    parser.add_argument("--seed", type=int, default=0, help="of text that the model samples")
    parser.add_argument(
        "--device", default="cpu", help="where matrices are quantized: 'cpu' or 'cuda'"
    )
    add_source_flags(parser, "read")
    finish(parser, run_quantize)


def run_quantize(options: argparse.Namespace) -> int:
    """Writes the checkpoint, and says what it is and how large."""
    from hetero_llm.engine.resolve import resolve_alias
    from hetero_llm.models.quantized_writer import (
        check_out,
        check_quantizable,
        write_quantized,
    )
    from hetero_llm.models.read_config import load_model_config

    folder = model_folder(options, resolve_alias(options.model))
    out = Path(options.out).expanduser()
    check_out(out)
    # Before the model samples text.
    config = load_model_config(folder, quantization=options.format)
    check_quantizable(folder, options.format, allow_pickle=options.allow_pickle_weights)
    write_quantized(
        folder,
        out,
        options.format,
        device=options.device,
        allow_pickle=options.allow_pickle_weights,
        show_progress=sys.stderr.isatty(),
        texts=_texts(options, folder, config),
    )
    tool = "bitsandbytes" if options.format == "ifq_nf4" else "compressed-tensors"
    size = sum(path.stat().st_size for path in out.glob("*.safetensors"))
    sys.stdout.write(f"{out}: {size / 2**20:,.1f} MiB of weights, {tool}\n")
    return 0


def _texts(options: argparse.Namespace, folder: Path, config: ModelConfig) -> Tensor | None:
    """What to calibrate with; None: nothing."""
    from hetero_llm.commands.calibration_text import read_texts, sample_texts

    said = options.calibration
    if said is None:
        said = _SELF if options.format in _OF_4_BITS else _NONE
    if said == _NONE:
        return None
    if options.calibration_tokens < 2:
        raise ConfigError("calibration_tokens", options.calibration_tokens, "2 or more are needed")
    if said == _SELF:
        sys.stderr.write(f"sampling {options.calibration_tokens:,} tokens to calibrate with\n")
        return sample_texts(
            folder,
            device=options.device,
            tokens=options.calibration_tokens,
            seed=options.seed,
            allow_pickle=options.allow_pickle_weights,
        )
    return read_texts(
        Path(said).expanduser(),
        folder,
        tokens=options.calibration_tokens,
        vocab_size=config.vocab_size,
        context=config.max_model_len,
    )
