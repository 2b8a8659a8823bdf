"""From a model name to its folder, local or a snapshot of the hub, and to its weight files.

Imports no torch, so that a missing model is reported at once.
"""

from __future__ import annotations

import re
from pathlib import Path

from hetero_llm.core.errors import ModelLoadError, shown
from hetero_llm.models.config_reader import read_json, short_reason
from hetero_llm.models.gguf.container import is_gguf
from hetero_llm.utils.files import MIB, check_regular, user_path

LOAD_FORMATS = ("auto", "safetensors", "pt", "gguf", "dummy")
"""How weights are stored: "auto" is a GGUF file if the model is one, else safetensors, or pickled
files if those are allowed; "pt" is pickled files; "gguf" is one GGUF file, which holds
configuration and tokenizer, too; "dummy" makes random weights and needs no file."""

SAFETENSORS = ("*.safetensors",)
PICKLED = ("*.bin", "*.pt", "*.pth")
GGUF = "*.gguf"
# What serving reads besides weights: configuration, tokenizer, chat template.
_PLAIN = ("*.json", "*.model", "*.txt", "*.jinja", "*.tiktoken")
_CODE = ("*.py",)
_AUTHORS_OWN = ("original/*", "consolidated*")  # the weights again, in another layout
_OF_TRAINING = (
    "training_args.bin", "optimizer.*", "scheduler.*", "scaler.*", "rng_state*", "random_states*",
)  # fmt: skip
_TEMPLATES = "additional_chat_templates/*.jinja"
# Of files that transformers opens itself, by name, the first match; other files have no limit.
_MOST_BYTES = (
    ("tokenizer_config.json", 64 * MIB), ("added_tokens.json", 64 * MIB),
    ("special_tokens_map.json", 16 * MIB), ("*processor*_config.json", 16 * MIB),
    ("*config.json", 16 * MIB), ("chat_template.json", 16 * MIB), ("*.jinja", 16 * MIB),
    ("tokenizer*.json", 512 * MIB), ("vocab*", 512 * MIB), ("merges.txt", 512 * MIB),
    ("tekken.json", 512 * MIB), ("*.model", 512 * MIB), ("*.tiktoken", 512 * MIB),
)  # fmt: skip
_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*(/[A-Za-z0-9][\w.-]*)?")


def resolve_model_folder(
    model: str,
    *,
    revision: str | None = None,
    download_dir: str | None = None,
    load_format: str = "auto",
    allow_pickle: bool = False,
    remote_code: bool = False,
) -> Path:
    """The local folder of a model, downloaded from the hub if it is not one already; or its GGUF
    file, which stands for a folder wherever one is read.

    Without a connection, or with HF_HUB_OFFLINE=1, a snapshot in the hub's cache is used.

    Args:
        model: A folder, a GGUF file, a folder with one GGUF file and no config.json, or a hub id
            such as "org/name".
        revision: Branch, tag or commit on the hub; has no meaning for a local folder.
        download_dir: Cache folder of the downloads; None is huggingface_hub's own.
        load_format: Of `LOAD_FORMATS`; "dummy" downloads no weights.
        allow_pickle: Pickled weights are downloaded where there are no safetensors files.
        remote_code: The checkpoint's own code is downloaded too.

    Raises:
        ModelLoadError: No such folder, or the hub did not deliver, or a file of it is no regular
            one or far larger than such files are.
    """
    try:
        folder = local_path(model)
    except ModelLoadError as error:
        raise ModelLoadError(f"model={shown(model)}: {error}") from error
    if model and folder.is_dir():
        _check_files(folder)
        only_gguf = not (folder / "config.json").exists() and any(folder.glob(GGUF))
        return _gguf_file(folder) if load_format == "gguf" or only_gguf else folder
    if is_gguf(folder) or load_format == "gguf":
        if not (is_gguf(folder) and folder.exists()):
            raise ModelLoadError(f"model={shown(model)}: no such GGUF file, nor a folder with one")
        _check_file(folder, folder, None)
        return folder
    if model and folder.exists():
        raise ModelLoadError(f"model={shown(model)}: a file, where a model folder is needed")
    if not is_hub_id(model):
        raise ModelLoadError(f"model={shown(model)}: no such folder")
    weights = {"dummy": (), "pt": PICKLED if allow_pickle else ()}.get(load_format, SAFETENSORS)
    wanted = (*weights, *(_CODE if remote_code else ()))
    folder = _download(model, revision, download_dir, wanted)
    if load_format == "auto" and allow_pickle and not weight_files(folder, SAFETENSORS):
        folder = _download(model, revision, download_dir, PICKLED)
    _check_files(folder)
    return folder


def local_path(path: str) -> Path:
    """Where the folder of a model or an adapter would be, with "~" as the home folder.

    Raises:
        ModelLoadError: The system cannot even look; the message names no path.
    """
    try:
        return user_path(path)
    except OSError as error:
        raise ModelLoadError(f"no such folder: {error.strerror or error}") from error


def _gguf_file(folder: Path) -> Path:
    files = sorted(folder.glob(GGUF))
    if not files:
        raise ModelLoadError(f"{folder}: no {GGUF} file")
    if len(files) > 1:
        names = ", ".join(path.name for path in files)
        raise ModelLoadError(
            f"{folder}: several GGUF files, name one of them as the model: {names}"
        )
    _check_file(files[0], files[0], None)
    return files[0]


def weight_files(folder: Path, patterns: tuple[str, ...]) -> list[Path]:
    """The folder's files, sorted, that match the first of `patterns` that any file matches;
    without files of training and without second copies of the weights."""
    for pattern in patterns:
        files = sorted(path for path in folder.glob(pattern) if is_served_weight(path))
        if files:
            return files
    return []


def is_hub_snapshot(folder: Path) -> bool:
    """Whether the folder is in the hub's cache, so that it may lack files that the hub has."""
    return folder.parent.name == "snapshots"


def is_served_weight(path: Path) -> bool:
    """Whether a file of `SAFETENSORS` or `PICKLED` holds the weights that are served."""
    return not any(path.match(pattern) for pattern in (*_AUTHORS_OWN, *_OF_TRAINING))


def _check_files(folder: Path) -> None:
    """Checks the files that libraries open by their names: those would wait for a pipe, or read a
    device for ever. Also checks files elsewhere that tokenizer_config.json names."""
    patterns = (*_PLAIN, _TEMPLATES, *SAFETENSORS, *PICKLED)
    try:
        files = {path for pattern in patterns for path in folder.glob(pattern)}
    except OSError as error:
        raise ModelLoadError(f"{folder}: cannot be read: {error.strerror or error}") from error
    settings = folder / "tokenizer_config.json"
    for path in sorted(files):
        most = next((most for name, most in _MOST_BYTES if path.match(name)), None)
        _check_file(path, path, most)
    if settings in files:
        for key, value in read_json(settings, most=64 * MIB).items():
            if key.endswith("_file") and isinstance(value, str) and Path(value).exists():
                _check_file(Path(value), f"{settings}: {key}={shown(value)}", 512 * MIB)


def _check_file(path: Path, where: Path | str, most: int | None) -> None:
    if not path.exists() or path.is_dir():  # a link that leads nowhere: as if it were absent
        return
    try:
        check_regular(path, most=most)
    except OSError as error:
        raise ModelLoadError(f"{where}: {error.strerror or error}") from error


def _download(
    model: str, revision: str | None, download_dir: str | None, wanted: tuple[str, ...]
) -> Path:
    try:
        return download_snapshot(
            model,
            (*wanted, *_PLAIN),
            revision=revision,
            download_dir=download_dir,
            unwanted=(*_AUTHORS_OWN, *_OF_TRAINING),
        )
    except ModelLoadError as error:
        raise ModelLoadError(f"model={shown(model)}: no such folder, and {error}") from error


def is_hub_id(name: str) -> bool:
    """Whether a name has the form of a hub id, such as "org/name"."""
    return bool(_HUB_ID.fullmatch(name)) and "--" not in name and ".." not in name


def download_snapshot(
    hub_id: str,
    wanted: tuple[str, ...],
    *,
    revision: str | None = None,
    download_dir: str | None = None,
    unwanted: tuple[str, ...] = (),
) -> Path:
    """The folder of a snapshot in the hub's cache, fetched if it is not there.

    Args:
        wanted, unwanted: patterns of file names.
        revision, download_dir: see `resolve_model_folder`.

    Raises:
        ModelLoadError: the hub did not deliver it; the message begins with "the hub".
    """
    # Lazy: the hub client takes a while to import and local folders do not need it.
    from huggingface_hub import snapshot_download

    try:
        path = snapshot_download(
            hub_id,
            revision=revision,
            cache_dir=download_dir,
            allow_patterns=list(wanted),
            ignore_patterns=list(unwanted),
        )
    except Exception as error:  # the hub client raises its own, its HTTP library's, OS and value
        reason = f"the hub did not deliver it (revision={revision!r}): {short_reason(error)}"
        raise ModelLoadError(reason) from error
    return Path(path)
