"""`hetero-llm manifest`: the SHA-256 of a model's files, for `--model-sha256`."""

from __future__ import annotations

import argparse
import hashlib
import sys
from pathlib import Path

from hetero_llm.commands.console import Finish
from hetero_llm.commands.options import add_source_flags, model_folder
from hetero_llm.core.errors import ConfigError


def add_manifest(parser: argparse.ArgumentParser, finish: Finish) -> None:
    """Fills the parser of `manifest`."""
    parser.add_argument(
        "model",
        metavar="MODEL",
        help="folder, GGUF file or Hugging Face name of the model, or 'demo'",
    )
    add_source_flags(parser, "fetch")
    parser.add_argument(
        "--out",
        metavar="FILE",
        help="where to write it; default: SHA256SUMS in the model's folder, for an embedded model "
        "in the current one; '-' is standard output",
    )
    finish(parser, run_manifest)


def run_manifest(options: argparse.Namespace) -> int:
    """Writes the manifest and shows its SHA-256, which `--model-sha256` also accepts."""
    from hetero_llm.engine.resolve import resolve_alias
    from hetero_llm.models.manifest import MANIFEST_NAME, folder_of, manifest_of

    name = resolve_alias(options.model)
    folder = model_folder(options, name)
    text = manifest_of(folder)
    if not text:
        raise ConfigError("model", options.model, "there is nothing to serve in its folder")
    if options.out == "-":
        sys.stdout.write(text)
        return 0
    # An embedded model's folder is the installed package's, not the user's.
    default = (folder_of(folder) if name == options.model else Path()) / MANIFEST_NAME
    path = default if options.out is None else Path(options.out).expanduser()
    try:
        path.write_bytes(text.encode())
    except OSError as error:
        reason = f"{error.strerror or error}; name another file with --out"
        raise ConfigError("out", str(path), reason) from None
    digest = hashlib.sha256(text.encode()).hexdigest()
    sys.stdout.write(f"{path}: {text.count(chr(10))} files, SHA-256 {digest}\n")
    return 0
