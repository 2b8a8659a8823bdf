"""From a model name to a module with weights: find the folder, build, stream safetensors in."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor
from tqdm import tqdm

from hetero_llm.core.errors import ConfigError, ModelLoadError, shown
from hetero_llm.models.config import ModelConfig
from hetero_llm.models.layers import CausalLM, Place
from hetero_llm.models.registry import model_class

LOAD_FORMATS = ("auto", "safetensors", "dummy")

_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*(/[A-Za-z0-9][\w.-]*)?")
_INDEX_FILE = "model.safetensors.index.json"
_PICKLED_PATTERNS = ("*.bin", "*.pt", "*.pth")
# What a folder needs to be served: weights, configuration, tokenizer, chat template.
_HUB_PATTERNS = ("*.safetensors", "*.json", "*.model", "*.txt", "*.jinja", "*.tiktoken")
# Second copies of the weights in the authors' own layout.
_HUB_IGNORED = ("original/*", "consolidated*")
_DUMMY_STD = 0.02
_NAMES_SHOWN = 5


def resolve_model_folder(
    model: str, *, revision: str | None = None, download_dir: str | None = None
) -> Path:
    """The local folder of a model, downloaded from the hub if it is not one already.

    Args:
        model: A folder, or a hub id such as "org/name".
        revision: Branch, tag or commit on the hub; has no meaning for a local folder.
        download_dir: Cache folder of the downloads; None is huggingface_hub's own.

    Raises:
        ModelLoadError: No such folder, or the hub did not deliver.
    """
    folder = Path(model).expanduser()
    if model and folder.is_dir():
        return folder
    if model and folder.exists():
        raise ModelLoadError(f"model={shown(model)}: a file, where a model folder is needed")
    if not _HUB_ID.fullmatch(model) or "--" in model or ".." in model:
        raise ModelLoadError(f"model={shown(model)}: no such folder")
    return _download(model, revision, download_dir)


def load_model(
    folder: Path,
    config: ModelConfig,
    *,
    dtype: torch.dtype,
    device: torch.device | str,
    show_progress: bool,
    load_format: str = "auto",
    seed: int = 0,
) -> CausalLM:
    """Builds the model of `config` and fills it from the folder's safetensors files.

    Tensors are copied one by one from memory-mapped files into their place, so the peak is the
    model itself plus pages the kernel can drop.

    Args:
        folder: Of `resolve_model_folder`.
        config: Of `load_model_config`.
        dtype: Of every parameter; stored tensors are converted.
        device: Where the parameters live.
        show_progress: A progress bar in bytes on stderr.
        load_format: "auto" and "safetensors" read the files; "dummy" draws random weights.
        seed: Of the random weights.

    Returns:
        The model in eval mode, parameters without gradients.

    Raises:
        ModelLoadError: Files missing, damaged, or not those of `config`; the message names them.
    """
    if load_format not in LOAD_FORMATS:
        raise ConfigError("load_format", load_format, "one of " + ", ".join(LOAD_FORMATS))
    folder = Path(folder)
    files = [] if load_format == "dummy" else _weight_files(folder)
    with default_dtype(dtype), torch.device(device):
        model = model_class(config.architecture)(config)
    model.eval().requires_grad_(False)
    if load_format == "dummy":
        _fill_randomly(model, seed)
    else:
        _fill_from_files(model, folder, files, show_progress)
    return model


@contextmanager
def default_dtype(dtype: torch.dtype) -> Iterator[None]:
    """torch's default type while a model is built."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


def _download(model: str, revision: str | None, download_dir: str | None) -> Path:
    # Lazy: the hub client takes a while to import and local folders do not need it.
    from huggingface_hub import snapshot_download

    try:
        path = snapshot_download(
            model,
            revision=revision,
            cache_dir=download_dir,
            allow_patterns=list(_HUB_PATTERNS),
            ignore_patterns=list(_HUB_IGNORED),
        )
    except Exception as error:  # the hub client raises its own, httpx', OS and value errors
        reason = " ".join(str(error).split())[:200] or type(error).__name__
        raise ModelLoadError(
            f"model={shown(model)}: no such folder, and the hub did not deliver it "
            f"(revision={revision!r}): {reason}"
        ) from error
    return Path(path)


def _weight_files(folder: Path) -> list[Path]:
    """The safetensors files of a folder, those of the index if there is one."""
    index = folder / _INDEX_FILE
    if index.exists():
        return _indexed_files(index)
    files = sorted(p for p in folder.glob("*.safetensors") if not p.match("consolidated*"))
    if files:
        return files
    if any(True for pattern in _PICKLED_PATTERNS for _ in folder.glob(pattern)):
        raise ModelLoadError(
            f"{folder}: only pickled weights; safetensors files are needed "
            "(save_pretrained(..., safe_serialization=True) converts them)"
        )
    raise ModelLoadError(f"{folder}: no *.safetensors file")


def _indexed_files(index: Path) -> list[Path]:
    try:
        weight_map = json.loads(index.read_text(encoding="utf-8"))["weight_map"]
        names = sorted(set(weight_map.values()))
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise ModelLoadError(f"{index}: not a weight index: {error!r}") from error
    for name in names:
        if not isinstance(name, str) or Path(name).name != name:
            raise ModelLoadError(f"{index}: {shown(name)} is not a file name")
        if not (index.parent / name).is_file():
            raise ModelLoadError(f"{index}: names the shard {name}, which is missing")
    return [index.parent / name for name in names]


def _fill_from_files(model: CausalLM, folder: Path, files: list[Path], show_progress: bool) -> None:
    """Checks names and shapes of all files first, so that a wrong folder fails at once."""
    targets = model.checkpoint_tensors()
    stored = _checked_headers(model, targets, folder, files)
    total = sum(file.stat().st_size for file in files)
    with tqdm(
        total=total, unit="B", unit_scale=True, desc="loading weights", disable=not show_progress
    ) as bar:
        for file in files:
            read = 0
            with _open(file) as tensors:
                for name, ours in stored[file]:
                    try:
                        tensor = tensors.get_tensor(name)
                    except SafetensorError as error:
                        raise ModelLoadError(f"{file}: {name}: damaged: {error}") from error
                    _fill(targets[ours], tensor)
                    read += tensor.nbytes
                    bar.update(tensor.nbytes)
            bar.update(file.stat().st_size - read)  # the header and what was skipped


def _fill(target: Tensor | Place, stored: Tensor) -> None:
    if isinstance(target, Place):
        target.fill(stored)
    else:
        target.copy_(stored)


def _checked_headers(
    model: CausalLM, targets: Mapping[str, Tensor | Place], folder: Path, files: list[Path]
) -> dict[Path, list[tuple[str, str]]]:
    """Per file, (stored name, our name) of the tensors to load; each target exactly once."""
    stored: dict[Path, list[tuple[str, str]]] = {}
    place: dict[str, Path] = {}
    unexpected: list[str] = []
    wrong: list[str] = []
    for file in files:
        stored[file] = []
        with _open(file) as tensors:
            for name in tensors.keys():  # noqa: SIM118 - safe_open is no dict
                ours = model.checkpoint_name(name)
                if ours is None:
                    continue
                if ours not in targets:
                    unexpected.append(name)
                    continue
                if ours in place:
                    raise ModelLoadError(
                        f"{folder}: {ours} is stored twice, in {place[ours].name} and {file.name}"
                    )
                place[ours] = file
                shape, needed = tensors.get_slice(name).get_shape(), list(targets[ours].shape)
                if shape != needed:
                    wrong.append(f"{name} is {shape}, config.json says {needed}")
                stored[file].append((name, ours))
    problems = {
        "missing": [name for name in targets if name not in place],
        "unexpected": unexpected,
        "of wrong shape": wrong,
    }
    lines = [f"tensors {kind}: {_some(names)}" for kind, names in problems.items() if names]
    if lines:
        raise ModelLoadError(f"{folder}: " + "; ".join(lines))
    return stored


def _open(file: Path) -> safe_open:
    try:
        return safe_open(file, framework="pt", device="cpu")
    except (SafetensorError, OSError) as error:
        raise ModelLoadError(
            f"{file}: not a readable safetensors file, copy or download it again: {error}"
        ) from error


def _some(names: list[str]) -> str:
    more = len(names) - _NAMES_SHOWN
    return ", ".join(names[:_NAMES_SHOWN]) + (f" and {more} more" if more > 0 else "")


def _fill_randomly(model: CausalLM, seed: int) -> None:
    """Reproducible weights of a trained model's magnitude: norms 1, the rest uniform."""
    generators: dict[torch.device, torch.Generator] = {}
    bound = _DUMMY_STD * 3**0.5
    for name, parameter in model.named_parameters():
        device = parameter.device
        if device not in generators:
            generators[device] = torch.Generator(device).manual_seed(seed)
        if parameter.dim() == 1 and name.endswith("weight"):
            parameter.fill_(1.0)
        else:
            parameter.uniform_(-bound, bound, generator=generators[device])
