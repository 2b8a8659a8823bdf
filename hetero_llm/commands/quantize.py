"""`hetero-llm quantize`: a copy of a model whose weights are stored quantized."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

_FORMATS = ("fp8", "fp8_block", "ifq", "int4")


def add_quantize(
    parser: argparse.ArgumentParser, finish: Callable[[argparse.ArgumentParser, Any], None]
) -> None:
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
        "128 x 128, 'ifq' is int8, 'int4' has a scale for each 128 columns",
    )
    parser.add_argument(
        "--device", default="cpu", help="where matrices are quantized: 'cpu' or 'cuda'"
    )
    parser.add_argument("--revision", default=None, help="branch, tag or commit of the model")
    parser.add_argument("--download-dir", default=None, help="where the hub's cache is")
    parser.add_argument(
        "--allow-pickle-weights", action="store_true", help="read pickled weights, too"
    )
    finish(parser, run_quantize)


def run_quantize(options: argparse.Namespace) -> int:
    """Writes the checkpoint, and says what it is and how large."""
    from hetero_llm.engine.resolve import resolve_alias
    from hetero_llm.models.folders import resolve_model_folder
    from hetero_llm.models.quantized_writer import write_quantized

    folder = resolve_model_folder(
        resolve_alias(options.model),
        revision=options.revision,
        download_dir=options.download_dir,
        allow_pickle=options.allow_pickle_weights,
    )
    out = Path(options.out).expanduser()
    write_quantized(
        folder,
        out,
        options.format,
        device=options.device,
        allow_pickle=options.allow_pickle_weights,
        show_progress=sys.stderr.isatty(),
    )
    size = sum(path.stat().st_size for path in out.glob("*.safetensors"))
    sys.stdout.write(f"{out}: {size / 2**20:,.1f} MiB of weights, compressed-tensors\n")
    return 0
