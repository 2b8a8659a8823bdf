"""`hetero-llm cache`: makes, checks and shows snapshots of the lookahead cache without an engine;
shows and clears the cache of compiled code.

Each command returns the text to print. Heavy modules are imported only by the command that runs.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hetero_llm.commands.console import DEMO_MODEL, PROGRAM, Finish, add_command, held_files, write
from hetero_llm.config.args import (
    ENGINE_ARGS,
    add_flags,
    engine_args_from_namespace,
    resolve_engine_args,
)
from hetero_llm.config.engine_config import EngineConfig
from hetero_llm.core.errors import ConfigError, SnapshotError
from hetero_llm.utils.files import MIB, as_config_errors, read_bytes

if TYPE_CHECKING:
    from hetero_llm.engine.text.tokenizer import Tokenizer
    from hetero_llm.spec_decode.lookahead.snapshot import SnapshotRequirements

_MOST_TEXT = 256 * MIB
_MODEL_FLAGS = (
    "model", "tokenizer", "tokenizer_mode", "trust_remote_code", "revision", "tokenizer_revision",
    "download_dir", "max_model_len", "lookahead_cache_config_dir",
    "cpu_decoding_memory_utilization",
)  # fmt: skip
"""Engine arguments that decide which tokens a cache holds, and how many."""


def add_save(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("texts", metavar="TEXT", nargs="+", help="a file of UTF-8 text")
    parser.add_argument("--out", metavar="FILE", required=True, help="the snapshot to write")
    _add_model(parser)


def save(options: argparse.Namespace) -> str:
    """Writes a snapshot of text files; each file is one document.

    Raises:
        ConfigError: a text cannot be read, or the texts do not fit the configuration.
        SnapshotError: the snapshot cannot be written.
    """
    requirements, tokenizer = _open(options)
    import numpy as np

    from hetero_llm.kv_cache.prefix_cache import hash_root
    from hetero_llm.spec_decode.lookahead.global_cache import CacheContent, Generation
    from hetero_llm.spec_decode.lookahead.sequence_state import namespace_salt, with_separators
    from hetero_llm.spec_decode.lookahead.snapshot import write_snapshot

    documents, nothing = Generation(), Generation().content()
    for name in options.texts:
        # verbose=False: no warning about a text longer than the model's context.
        ids = tokenizer.hf.encode(_text(name), add_special_tokens=False, verbose=False)
        tokens = np.array(ids, np.int32)
        if len(tokens) and tokens.max() >= requirements.voc_size:
            reason = f"{name} holds token id {tokens.max()}"
            raise ConfigError("voc_size", requirements.voc_size, reason)
        documents.add(
            with_separators(tokens, requirements.stop_tokens), 0, namespace_salt(hash_root()), 0
        )
    if documents.end > requirements.capacity:
        reason = f"the texts need {documents.end}, one token between two of them included"
        raise ConfigError("cache_size", requirements.capacity, reason)
    content = CacheContent(static=documents.content(), old=nothing, young=nothing)
    size = write_snapshot(options.out, content, tokenizer.fingerprint())
    tokens_held = documents.end - documents.num_documents
    return f"{options.out}: {len(options.texts)} texts, {tokens_held} tokens, {size} bytes\n"


def add_load(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("file", metavar="FILE", help="a snapshot")
    _add_model(parser)


def load(options: argparse.Namespace) -> str:
    """Checks that an engine of this model and configuration can load a snapshot.

    Raises:
        ConfigError: model or configuration are wrong.
        SnapshotError: it cannot.
    """
    requirements, _ = _open(options)
    from hetero_llm.spec_decode.lookahead.snapshot import read_snapshot

    header, _ = read_snapshot(options.file, requirements)
    return (
        f"{options.file} fits: {header.num_tokens - header.num_documents} tokens in "
        f"{header.num_documents} documents; needs a cache_size of {header.needed}, "
        f"there is room for {requirements.capacity}\n"
    )


def add_stats(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("file", metavar="FILE", help="a snapshot")
    parser.add_argument("--json", action="store_true", help="print JSON")


def stats(options: argparse.Namespace) -> str:
    """The contents of a snapshot, and its memory with the default configuration.

    Raises:
        SnapshotError: the snapshot cannot be read or is damaged.
    """
    from hetero_llm.config.lookahead_config import LookaheadConfig
    from hetero_llm.spec_decode.lookahead.global_cache import SPACE, GlobalCache
    from hetero_llm.spec_decode.lookahead.snapshot import read_snapshot

    header, content = read_snapshot(options.file)
    cache = GlobalCache(LookaheadConfig(), header.needed, uses_ngrams=True, uses_trie=True)
    cache.restore(content)
    generations = (content.static, content.old, content.young)
    report: dict[str, Any] = {
        "tokens": header.num_tokens - header.num_documents,
        "documents": header.num_documents,
        "namespaces": len({s for part in generations for s in part.documents[:, SPACE].tolist()}),
        "bigrams": cache.num_bigrams,
        "cache_size": header.needed,
        "file_bytes": Path(options.file).stat().st_size,
        "memory_bytes": cache.num_bytes,
        "tokenizer": header.tokenizer,
    }
    if options.json:
        return json.dumps(report) + "\n"
    return "".join(f"{_LABELS[key]:<28}{value}\n" for key, value in report.items())


def add_compiled(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--clear", action="store_true", help="delete what is in the cache")


def compiled(options: argparse.Namespace) -> str:
    """The folders of compiled code and what they hold.

    Raises:
        ConfigError: the folder that is written to cannot be cleared.
    """
    from hetero_llm.utils import cache_folder

    written = cache_folder.write_folder()
    if options.clear:
        try:
            cache_folder.clear(written)
        except OSError as error:
            reason = f"cannot be cleared: {error.strerror}"
            raise ConfigError("HETERO_LLM_CACHE_DIR", str(written), reason) from None
    lines = []
    for folder in cache_folder.folders():
        if folder != written and not folder.is_dir():
            continue
        kind = "" if folder == written else ", read only"
        lines.append(f"{folder}: {held_files(folder)}{kind}\n")
    return "".join(lines)


_LABELS = {
    "tokens": "tokens",
    "documents": "documents",
    "namespaces": "namespaces (cache_salt)",
    "bigrams": "different pairs of tokens",
    "cache_size": "cache_size needed",
    "file_bytes": "bytes of the file",
    "memory_bytes": "bytes in memory",
    "tokenizer": "tokenizer (SHA-256)",
}

COMMANDS = (
    ("save", add_save, save, "write a snapshot that an engine can start from, from text files"),
    ("load", add_load, load, "check that a snapshot fits a model and a configuration"),
    ("stats", add_stats, stats, "show what a snapshot holds"),
    ("compiled", add_compiled, compiled, "show or clear the cache of compiled code"),
)
"""(name, function that adds the arguments, function that runs, help text) of each command."""


def add_cache(parser: argparse.ArgumentParser, finish: Finish) -> None:
    """Fills the parser of `cache`."""
    commands = parser.add_subparsers(title="commands", metavar="COMMAND", required=True)
    for name, add, run, text in COMMANDS:
        command = add_command(commands, name, text)
        add(command)
        finish(command, partial(run_cache, run))


def run_cache(command: Callable[[argparse.Namespace], str], options: argparse.Namespace) -> int:
    """Runs a command and prints its text. Returns the exit code: 1 if a snapshot is at fault."""
    try:
        write(command(options))
    except SnapshotError as error:
        print(f"{PROGRAM}: error: {' '.join(str(error).splitlines())}", file=sys.stderr)
        return 1
    return 0


def _add_model(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("Model and configuration")
    for spec in ENGINE_ARGS:
        if spec.name in _MODEL_FLAGS:
            add_flags(group, spec)


def _open(options: argparse.Namespace) -> tuple[SnapshotRequirements, Tokenizer]:
    """Requirements on snapshots of an engine with these flags, and its tokenizer."""
    given = {"model": DEMO_MODEL, "use_lookahead": True, **engine_args_from_namespace(options)}
    config = EngineConfig.from_args(resolve_engine_args(given))
    from hetero_llm.engine.builders.build_drafter import fit_to_model, requirements_for
    from hetero_llm.engine.resolve import open_model
    from hetero_llm.pooling.pooling_model import PoolingModel

    opened = open_model(config)
    tokenizer, speculation = opened.tokenizer, config.speculation
    assert speculation is not None and speculation.lookahead is not None and tokenizer is not None
    if isinstance(opened.config, PoolingModel):
        name = opened.config.class_name
        raise ConfigError("model", config.load.model, f"{name} pools, and drafts nothing")
    settings = fit_to_model(speculation.lookahead, opened.config, opened.max_model_len)
    return requirements_for(settings, speculation.memory_utilization, tokenizer), tokenizer


def _text(name: str) -> str:
    with as_config_errors("TEXT", name):
        return read_bytes(name, most=_MOST_TEXT, pipes=True).decode("utf-8")
