"""`hetero-llm manifest`: the SHA-256 of a model's files, for `--model-sha256`."""

from __future__ import annotations

import argparse
import hashlib
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from hetero_llm.core.errors import ConfigError


def add_manifest(
    parser: argparse.ArgumentParser, finish: Callable[[argparse.ArgumentParser, Any], None]
) -> None:
    """Fills the parser of `manifest`."""
    parser.add_argument(
        "model",
        metavar="MODEL",
        help="folder, GGUF file or Hugging Face name of the model, or 'demo'",
    )
    parser.add_argument("--revision", default=None, help="branch, tag or commit of the model")
    parser.add_argument("--download-dir", default=None, help="where the hub's cache is")
    parser.add_argument(
        "--allow-pickle-weights", action="store_true", help="fetch pickled weights, too"
    )
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
    from hetero_llm.models.folders import resolve_model_folder
    from hetero_llm.models.manifest import MANIFEST_NAME, folder_of, manifest_of

    name = resolve_alias(options.model)
    folder = resolve_model_folder(
        name,
        revision=options.revision,
        download_dir=options.download_dir,
        allow_pickle=options.allow_pickle_weights,
    )
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
