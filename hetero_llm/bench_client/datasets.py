"""Prompts of a bench, random or from files. All random choices depend on one seed."""

from __future__ import annotations

import json
import logging
import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

from hetero_llm.bench_client.wire_format import Sample
from hetero_llm.core.errors import ConfigError, shown
from hetero_llm.utils.files import MIB, as_config_errors, read_text

logger = logging.getLogger(__name__)

DEFAULT_OUTPUT_LEN = 128
"""Tokens to generate if neither the user nor the data set gives a number."""

DEFAULT_VOCAB_SIZE = 2000
"""Token ids below this are in the vocabulary of any usual model."""

# The limits with which vLLM and SGLang read ShareGPT, so that figures can be compared.
_FEWEST_TOKENS = 4
_LONGEST_PROMPT = 1024
_LONGEST_TOTAL = 2048

_ROLES = {"human": "user", "user": "user", "gpt": "assistant", "chatgpt": "assistant"}
_SYLLABLES = ("ba", "de", "fi", "go", "ku", "la", "me", "ni", "po", "ru", "sa", "te", "vi", "zo")

_MOST_DATASET = 4096 * MIB
_WARMUP_WORDS = 16

CountTokens = Callable[[str], int]


@dataclass(frozen=True, slots=True)
class DatasetOptions:
    """Kind and lengths of the prompts. Lengths are in tokens; in words for random text.

    Attributes:
        input_len: length of random and held-out prompts.
        output_len: None: the number in the data set, else `DEFAULT_OUTPUT_LEN`.
        range_ratio: r: random lengths are uniform in (1 - r) to (1 + r) times the given one.
        prefix_len: length of the common prefixes of random prompts.
        num_prefixes: random prompts begin with one of this many prefixes, in turns.
    """

    name: str = "random"
    path: str | None = None
    prompt_as: str = "ids"
    input_len: int = 1024
    output_len: int | None = None
    range_ratio: float = 0.0
    prefix_len: int = 0
    num_prefixes: int = 1
    vocab_size: int = DEFAULT_VOCAB_SIZE
    seed: int = 0


def load_samples(
    options: DatasetOptions,
    count: int,
    count_tokens: CountTokens | None = None,
    *,
    warmups: int = 0,
) -> list[Sample]:
    """`warmups` samples and, behind them, `count` others, all different.

    Args:
        count_tokens: returns the number of tokens of a text; ShareGPT needs it if no output
            length is given.
        warmups: those that a file has no prompts left for are random.

    Raises:
        ConfigError: a file cannot be read, is damaged, or holds too few prompts.
    """
    rng = random.Random(options.seed)
    if options.name in ("random", "prefix_repetition"):
        return _random(options, warmups + count, rng)
    if options.name == "heldout":
        return _heldout(options, warmups + count, rng)
    if options.path is None:
        raise ConfigError("dataset_path", None, f"the data set {options.name!r} is a file")
    if options.name == "jsonl":
        samples = list(_jsonl(options))
    else:
        samples = list(_sharegpt(options, count_tokens))
        rng.shuffle(samples)
    if len(samples) < count:
        raise ConfigError(
            "dataset_path",
            options.path,
            f"{count} prompts are needed (of all runs), it has {len(samples)}",
        )
    missing = max(warmups + count - len(samples), 0)
    others = replace(options, name="random", prompt_as="text", input_len=_WARMUP_WORDS)
    return [*_random(others, missing, rng), *samples[: warmups + count - missing]]


def _random(options: DatasetOptions, count: int, rng: random.Random) -> list[Sample]:
    draw = _draw_ids if options.prompt_as == "ids" else _draw_words
    prefixes = [
        draw(rng, options.prefix_len, options.vocab_size) for _ in range(options.num_prefixes)
    ]
    samples = []
    for number in range(count):
        length = _spread_length(rng, options.input_len, options.range_ratio)
        wanted = options.output_len or DEFAULT_OUTPUT_LEN
        output_len = _spread_length(rng, wanted, options.range_ratio)
        parts = prefixes[number % len(prefixes)] + draw(rng, length, options.vocab_size)
        prompt: str | tuple[int, ...]
        prompt = tuple(map(int, parts)) if options.prompt_as == "ids" else " ".join(map(str, parts))
        samples.append(Sample(prompt, output_len))
    return samples


def _draw_ids(rng: random.Random, length: int, vocab_size: int) -> list[Any]:
    return [rng.randrange(vocab_size) for _ in range(length)]


def _draw_words(rng: random.Random, length: int, vocab_size: int) -> list[Any]:
    return ["".join(rng.choices(_SYLLABLES, k=rng.randint(1, 3))) for _ in range(length)]


def _spread_length(rng: random.Random, length: int, ratio: float) -> int:
    if ratio == 0.0:
        return length
    return rng.randint(max(1, round(length * (1 - ratio))), max(1, round(length * (1 + ratio))))


def _heldout(options: DatasetOptions, count: int, rng: random.Random) -> list[Sample]:
    """Python files that the demo models were not trained on."""
    from hetero_llm.demo_models import heldout_prompts

    rows = heldout_prompts().prompts
    if options.input_len > rows.shape[1]:
        reason = f"held-out prompts have {rows.shape[1]} tokens"
        raise ConfigError("input_len", options.input_len, reason)
    if count > len(rows):
        reason = f"{count} are needed (of all runs and the warm-up), there are {len(rows)}"
        raise ConfigError("dataset_name", "heldout", reason)
    order = rng.sample(range(len(rows)), count)
    prompts = [tuple(rows[row, : options.input_len].tolist()) for row in order]
    output_len = options.output_len or DEFAULT_OUTPUT_LEN
    if options.prompt_as == "ids":
        return [Sample(prompt, output_len) for prompt in prompts]
    decode = _demo_decoder()
    return [Sample(decode(prompt), output_len) for prompt in prompts]


def _demo_decoder() -> Callable[[Sequence[int]], str]:
    from tokenizers import Tokenizer

    from hetero_llm.demo_models import demo_folder

    tokenizer = Tokenizer.from_file(str(demo_folder("demo") / "tokenizer.json"))
    return lambda ids: str(tokenizer.decode(list(ids), skip_special_tokens=False))


def _jsonl(options: DatasetOptions) -> Iterator[Sample]:
    """Reads objects with `prompt` (text or ids) or `messages`, and optionally `output_len` or
    `output_tokens`; other keys are ignored."""
    assert options.path is not None
    for number, line in enumerate(_text(options.path).split("\n"), start=1):
        if not line.strip():
            continue
        where = f"{options.path}:{number}"
        row = _parsed(where, line)
        if not isinstance(row, dict):
            raise ConfigError("dataset_path", where, "is not a JSON object")
        output_len = options.output_len or row.get("output_len", row.get("output_tokens"))
        output_len = DEFAULT_OUTPUT_LEN if output_len is None else output_len
        if type(output_len) is not int or output_len < 1:
            raise ConfigError("dataset_path", where, f"output_len={shown(output_len)} is no length")
        yield _jsonl_sample(where, row, output_len)


def _jsonl_sample(where: str, row: dict[str, Any], output_len: int | None) -> Sample:
    prompt, messages = row.get("prompt"), row.get("messages")
    if isinstance(messages, list) and messages and all(isinstance(m, dict) for m in messages):
        return Sample(None, output_len, tuple(messages))
    if isinstance(prompt, str) and prompt:
        return Sample(prompt, output_len)
    if isinstance(prompt, list) and prompt and all(type(token) is int for token in prompt):
        return Sample(tuple(prompt), output_len)
    raise ConfigError("dataset_path", where, 'needs "prompt" (text or token ids) or "messages"')


def _sharegpt(options: DatasetOptions, count_tokens: CountTokens | None) -> Iterator[Sample]:
    """The first turn of each conversation that has an answer."""
    assert options.path is not None
    if options.output_len is None and count_tokens is None:
        reason = "ShareGPT answers need --tokenizer to be measured; or give --output-len"
        raise ConfigError("output_len", None, reason)
    rows = _parsed(options.path, _text(options.path))
    if not isinstance(rows, list):
        raise ConfigError("dataset_path", options.path, "is not a JSON list of conversations")
    skipped = 0
    for row in rows:
        turns = row.get("conversations", row.get("conversation")) if isinstance(row, dict) else None
        pair = _first_pair(turns)
        sample = None if pair is None else _sized(pair, options.output_len, count_tokens)
        if sample is None:
            skipped += 1
        else:
            yield sample
    if skipped:
        logger.info("%s: %d conversations too short or too long", options.path, skipped)


def _first_pair(turns: Any) -> tuple[str, str] | None:
    if not isinstance(turns, list):
        return None
    texts: list[str] = []
    for turn, role in zip(turns, ("user", "assistant"), strict=False):
        if not isinstance(turn, dict) or _ROLES.get(turn.get("from", "")) != role:
            return None
        text = turn.get("value")
        if not isinstance(text, str) or not text:
            return None
        texts.append(text)
    return (texts[0], texts[1]) if len(texts) == 2 else None


def _sized(
    pair: tuple[str, str], output_len: int | None, count_tokens: CountTokens | None
) -> Sample | None:
    prompt, answer = pair
    if count_tokens is None:
        return Sample(prompt, output_len)
    prompt_len, answer_len = count_tokens(prompt), output_len or count_tokens(answer)
    too_short = min(prompt_len, answer_len) < _FEWEST_TOKENS
    too_long = prompt_len > _LONGEST_PROMPT or prompt_len + answer_len > _LONGEST_TOTAL
    return None if too_short or too_long else Sample(prompt, answer_len)


def _text(path: str) -> str:
    with as_config_errors("dataset_path", path):
        return read_text(path, most=_MOST_DATASET, pipes=True)


def _parsed(where: str, text: str) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        raise ConfigError("dataset_path", where, f"is not valid JSON: {error}") from None
