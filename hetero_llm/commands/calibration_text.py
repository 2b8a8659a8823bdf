"""Texts for `hetero-llm quantize` to calibrate with: of a file, or sampled by the model itself."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hetero_llm.core.errors import ConfigError
from hetero_llm.utils.files import MIB, read_text

if TYPE_CHECKING:
    from torch import Tensor

TEXT_TOKENS = 512
"""Tokens of a text, if the model's context and the file have as many."""
_FIELD = "calibration"
_MOST_BYTES = 256 * MIB


def read_texts(path: Path, folder: Path, *, tokens: int, vocab_size: int, context: int) -> Tensor:
    """Token ids of a file, in texts of equal length.

    The tokens of all its texts follow one another and are cut into pieces of `TEXT_TOKENS`, each
    behind the token that begins a text if the tokenizer has one. Of more pieces than `tokens` asks
    for, some at equal distances are taken.

    Args:
        path: a text; if it ends in ".jsonl", a JSON object in each line, whose "text" is one.
        folder: of the model, for its tokenizer.
        tokens: of all texts together, at most.
        vocab_size, context: the model's.

    Returns:
        [S, L] int64.

    Raises:
        ConfigError: the file is missing, not readable, or has no two tokens.
        ModelLoadError: the model has no tokenizer.
    """
    import torch

    from hetero_llm.engine.text.tokenizer import load_tokenizer

    texts = _texts_of(path)
    tokenizer = load_tokenizer(folder, mode="auto", trust_remote_code=False)
    first = [token for token in tokenizer.encode("")[:1] if token in tokenizer.special_ids]
    ids = [token for text in texts for token in tokenizer.encode(text, add_special_tokens=False)]
    if len(ids) < 2:
        raise ConfigError(_FIELD, str(path), f"{len(ids)} tokens of text; name a file with more")
    if max(ids) >= vocab_size:
        reason = f"the tokenizer makes token {max(ids)} of it, the model has {vocab_size}"
        raise ConfigError(_FIELD, str(path), reason)
    length = min(TEXT_TOKENS, context, tokens, len(ids) + len(first)) - len(first)
    pieces = torch.tensor(ids[: len(ids) // length * length]).view(-1, length)
    wanted = max(1, tokens // (length + len(first)))
    if len(pieces) > wanted:
        pieces = pieces[torch.arange(wanted) * len(pieces) // wanted]
    return torch.cat([torch.tensor(first).long().expand(len(pieces), -1), pieces], dim=1)


def _texts_of(path: Path) -> list[str]:
    try:
        text = read_text(path, most=_MOST_BYTES, pipes=True)
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(_FIELD, str(path), f"cannot be read as text: {error}") from error
    if path.suffix != ".jsonl":
        return [text]
    texts = []
    for number, line in enumerate(text.splitlines(), 1):
        if not line.strip():
            continue
        try:
            found = json.loads(line)
        except (ValueError, RecursionError) as error:
            raise ConfigError(_FIELD, str(path), f"line {number}: no JSON: {error}") from error
        value = found.get("text") if isinstance(found, dict) else None
        if not isinstance(value, str):
            reason = f'line {number}: an object with a string "text" is needed'
            raise ConfigError(_FIELD, str(path), reason)
        texts.append(value)
    return texts


def sample_texts(
    folder: Path, *, device: str, tokens: int, seed: int, allow_pickle: bool
) -> Tensor:
    """Texts that the model samples itself at temperature 1 (Liu et al. 2023, "LLM-QAT: Data-Free
    Quantization Aware Training for Large Language Models").

    Text i begins with the token that begins or ends texts, or with token i of the vocabulary where
    there is neither, and is sampled with seed + i.

    Args:
        tokens: of all texts together, at most; one text at least.

    Returns:
        [S, L] int64.

    Raises:
        ModelLoadError: the engine cannot serve the model.
    """
    import torch

    from hetero_llm.core.sampling_params import SamplingParams
    from hetero_llm.engine.llm import LLM
    from hetero_llm.models.read_config import load_model_config

    config = load_model_config(folder)
    length = min(TEXT_TOKENS, config.max_model_len, tokens)
    count = max(1, tokens // length)
    begin = config.bos_token_id
    if begin is None and config.eos_token_ids:
        begin = config.eos_token_ids[0]
    first = [i % config.vocab_size if begin is None else begin for i in range(count)]
    params = [
        SamplingParams(
            temperature=1.0, max_tokens=length - 1, ignore_eos=True, seed=seed + i, detokenize=False
        )
        for i in range(count)
    ]
    with LLM(
        str(folder),
        device=device,
        skip_tokenizer_init=True,
        max_model_len=length,
        allow_pickle_weights=allow_pickle,
    ) as llm:
        prompts: Any = [{"prompt_token_ids": [token]} for token in first]
        outputs = llm.generate(prompts, params, use_tqdm=False)
    return torch.tensor(
        [[*output.prompt_token_ids, *output.outputs[0].token_ids] for output in outputs]
    )
