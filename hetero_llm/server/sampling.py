"""From a request's fields to `SamplingParams`, within the server's limits.

`SamplingParams` checks what can never be right; here is what would cost others too much, and
what only the context length decides.
"""

from __future__ import annotations

from typing import Any

from hetero_llm.core.errors import shown
from hetero_llm.core.sampling_params import RequestOutputKind, SamplingParams
from hetero_llm.server.errors import context_exceeded, invalid
from hetero_llm.server.protocol import ChatRequest, CompletionRequest, Generation
from hetero_llm.server.settings import Limits

_SAME_NAME = (
    "n",
    "best_of",
    "temperature",
    "top_p",
    "top_k",
    "min_p",
    "presence_penalty",
    "frequency_penalty",
    "repetition_penalty",
    "length_penalty",
    "early_stopping",
    "use_beam_search",
    "no_repeat_ngram_size",
    "seed",
    "stop",
    "stop_token_ids",
    "bad_words",
    "allowed_token_ids",
    "logit_bias",
    "ignore_eos",
    "min_tokens",
    "prompt_logprobs",
    "truncate_prompt_tokens",
    "detokenize",
    "skip_special_tokens",
    "spaces_between_special_tokens",
    "include_stop_str_in_output",
    "num_speculative_tokens",
)


def check_limits(request: Generation, limits: Limits, *, vocab_size: int) -> None:
    """Refuses what would keep the server busy with one request.

    Raises:
        ApiError: names the field and its limit.
    """
    for name in ("n", "best_of", "temperature"):
        _at_most(name, getattr(request, name), getattr(limits, name))
    stop = [request.stop] if isinstance(request.stop, str) else request.stop
    _short_list("stop", stop, limits.stop)
    _short_list("bad_words", request.bad_words, limits.bad_words)
    _short_list("stop_token_ids", request.stop_token_ids, limits.stop_token_ids)
    _short_list("logit_bias", request.logit_bias, limits.logit_bias)
    _short_list("allowed_token_ids", request.allowed_token_ids, vocab_size)
    _short_text("cache_salt", request.cache_salt, limits.salt_chars)
    _short_text("request_id", request.request_id, limits.request_id_chars)
    for word in stop or ():
        _short_text("stop", word, limits.stop_chars)
    for word in request.bad_words or ():
        _short_text("bad_words", word, limits.bad_word_chars)
    for name in ("logprobs", "top_logprobs", "prompt_logprobs"):
        value = getattr(request, name, None)
        if isinstance(value, bool) or value is None:
            continue
        _at_most(name, value, limits.logprobs)
        if value < 0:
            raise invalid(name, f"{name}={shown(value)}: must be at least 0")


def check_stream(request: Generation) -> None:
    """What contradicts streaming, or needs it.

    Raises:
        ApiError: names the field.
    """
    if not request.stream:
        if request.stream_options is not None:
            raise invalid("stream_options", "stream_options: needs stream=true")
        return
    if request.prompt_logprobs is not None:
        raise invalid(
            "prompt_logprobs", "prompt_logprobs: not with stream; a completion streams them with "
            "echo and logprobs"
        )  # fmt: skip
    if request.use_beam_search:
        raise invalid(
            "use_beam_search", "use_beam_search: its text is known at the end only; unset stream"
        )
    if request.best_of is not None and request.best_of > (request.n or 1):
        raise invalid(
            "best_of", "best_of: above n the best are known at the end only; unset stream"
        )


def sampling_params(
    request: CompletionRequest | ChatRequest, *, max_tokens: int | None
) -> SamplingParams:
    """The engine's parameters. `max_tokens` is what `budget` gave.

    Raises:
        SamplingError: a field is out of range or contradicts another one.
        ApiError: the fields for log-probabilities contradict each other.
    """
    values: dict[str, Any] = {
        name: value for name in _SAME_NAME if (value := getattr(request, name)) is not None
    }
    if isinstance(request, ChatRequest):
        values["logprobs"] = _chat_logprobs(request)
    else:
        values["logprobs"] = request.logprobs
        if request.echo and request.logprobs is not None:
            values["prompt_logprobs"] = max(request.logprobs, request.prompt_logprobs or 0)
    # Counting is not asked for: a request is one output, or deltas.
    kind = RequestOutputKind.DELTA if request.stream else RequestOutputKind.FINAL_ONLY
    return SamplingParams(**values, max_tokens=max_tokens, output_kind=kind)


def budget(
    wanted: int | None, default: int | None, *, prompt_tokens: int, max_model_len: int, name: str
) -> int | None:
    """Tokens to generate: what was asked for if it fits, else the default cut to what fits.

    Args:
        wanted: the request's number, None if it gave none.
        default: None for the rest of the context, which is also what None as a result means.
        name: of the request's field.

    Raises:
        ApiError: it does not fit.
    """
    room = max_model_len - prompt_tokens
    if wanted is None:
        if room < 1:
            raise context_exceeded(max_model_len, prompt_tokens, 1, "prompt")
        return None if default is None else min(default, room)
    if wanted > room:
        too_many = prompt_tokens if room < 1 else 0
        field = "prompt" if too_many else name
        raise context_exceeded(max_model_len, prompt_tokens, wanted, field)
    return wanted


def check_max_tokens(wanted: int | None, name: str, *, lowest: int) -> None:
    """Raises:
    ApiError: fewer than `lowest`.
    """
    if wanted is not None and wanted < lowest:
        zero = "; 0 scores a prompt, with echo in a completion" if wanted == 0 else ""
        raise invalid(name, f"{name}={wanted}: must be at least {lowest}{zero}")


def check_min_tokens(params: SamplingParams, *, prompt_tokens: int, max_model_len: int) -> None:
    """Without max_tokens only the context bounds min_tokens.

    Raises:
        ApiError: so many tokens can never be generated.
    """
    if prompt_tokens + params.min_tokens > max_model_len:
        raise invalid(
            "min_tokens",
            f"min_tokens={params.min_tokens}: with the {prompt_tokens} tokens of the prompt it "
            f"exceeds the context of {max_model_len}",
        )


def _chat_logprobs(request: ChatRequest) -> int | None:
    if not request.logprobs:
        if request.top_logprobs:
            raise invalid("top_logprobs", "top_logprobs: needs logprobs=true")
        return None
    return request.top_logprobs or 0


def _at_most(name: str, value: float | None, limit: float) -> None:
    if value is not None and value > limit:
        raise invalid(name, f"{name}={shown(value)}: must be at most {limit:g}")


def _short_list(name: str, values: Any, limit: int) -> None:
    if values is not None and len(values) > limit:
        raise invalid(name, f"{name}: {len(values)} entries, at most {limit} are accepted")


def _short_text(name: str, text: str | None, limit: int) -> None:
    if text is None:
        return
    if not text and name != "stop":  # SamplingParams says it about stop strings
        raise invalid(name, f"{name}='': must not be empty")
    if len(text) > limit:
        raise invalid(name, f"{name}: {len(text)} characters, at most {limit} are accepted")
