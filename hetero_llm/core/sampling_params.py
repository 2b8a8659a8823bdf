"""How one request is sampled. Names and meanings are those of the TACO-LLM manual and of vLLM."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence, Set
from dataclasses import InitVar, dataclass, fields
from enum import Enum
from numbers import Integral, Real
from typing import Any, NoReturn

from hetero_llm.core.errors import SamplingError
from hetero_llm.core.structured_outputs import GuidedDecodingParams, StructuredOutputsParams

GREEDY_TEMPERATURE = 1e-5
"""Temperatures below this are greedy, as in vLLM: dividing by them would overflow."""

MAX_SEED = 2**64 - 1
_LARGEST_INTEGER = 2**1023  # larger ones cannot become a float


class RequestOutputKind(Enum):
    """What `Engine.step` returns for a request: vLLM's three kinds."""

    CUMULATIVE = 0
    DELTA = 1
    FINAL_ONLY = 2


# large: one field for each sampling parameter that users have.
@dataclass(slots=True)
class SamplingParams:
    """Sampling parameters of one request, in vLLM's order, checked at construction.

    Fields can be assigned. A request takes a copy, which is checked again: assignments and changes
    of lists count for later requests, never for one that runs. Numbers may be numpy's.

    Args:
        n: Sequences returned per prompt.
        best_of: Sequences generated; the `n` with the highest cumulative log-probability are
            returned. The beam width with `use_beam_search`. None means `n`.
        presence_penalty: Subtracted once from the logit of every token already generated.
        frequency_penalty: Subtracted per occurrence among the generated tokens.
        repetition_penalty: Positive logits of tokens in prompt or output are divided by it,
            negative ones multiplied. Above 1 discourages, below 1 encourages repetition.
        temperature: 0 is greedy (anything below 1e-5 too).
        top_p: Smallest set of tokens whose probability reaches this, in (0, 1].
        top_k: Number of tokens considered; -1 (or 0) means all.
        min_p: Smallest probability relative to the most likely token, in [0, 1].
        seed: 0 to 2**64-1. The same seed gives the same tokens whatever else is in the batch (but
            for near ties in bfloat16 without batch_invariant). None or -1: derived from the
            engine's.
        use_beam_search: Beam search with width `best_of`.
        length_penalty: Beam scores are divided by (generated length) ** length_penalty.
        early_stopping: Beam search: True, False or "never" (see transformers' `generate`).
        stop: Strings that end generation; not part of the text unless
            `include_stop_str_in_output`. docs/design/text.md says what they are looked for in.
        stop_token_ids: Token ids that end generation. They stay in `token_ids`; their text is not
            part of the text unless `include_stop_str_in_output`.
        ignore_eos: Do not end at the end-of-sequence token.
        max_tokens: Most tokens generated per sequence; None means up to the context length.
        min_tokens: Neither EOS nor a stop token can be drawn before this many tokens.
        logprobs: Return the log-probabilities of this many most likely tokens, and of the drawn
            one (-1: the whole vocabulary; True: 1; False: none). They are the model's own, before
            any processing; with beam search those that the search ranks by, after penalties and
            masks. Of equally likely tokens the lower id comes first; they share a rank.
        prompt_logprobs: The same for every prompt token (the first has none).
        detokenize: Produce text; without a tokenizer there is none.
        skip_special_tokens: Leave special tokens out of the text.
        spaces_between_special_tokens: Keep the spaces a tokenizer puts between special tokens.
        logits_processors: Callables `f(output_ids, logits) -> logits`, or
            `f(prompt_ids, output_ids, logits)` when they take three arguments. Lists are copies.
        include_stop_str_in_output: Keep the stop string (or stop token's text) in the text.
        truncate_prompt_tokens: Keep only this many last tokens of the prompt; -1: as many as the
            context holds beside one generated token.
        no_repeat_ngram_size: No n-gram of this size occurs twice in prompt plus output; 0 is off.
        logit_bias: Token id to a value added to its logit, -100 to 100.
        bad_words: Strings that are never generated.
        allowed_token_ids: Only these tokens can be drawn.
        output_kind: What the engine returns while the request runs.
        num_speculative_tokens: Longest draft of this request in tokens, if the engine's is not
            shorter; 0 means no drafts, None the engine's. It changes how fast tokens come, not
            which (but for near ties in bfloat16).
        truncation_side: Which end of the prompt truncate_prompt_tokens cuts away: "left" or
            "right".
        logprob_token_ids: Not available yet: log-probabilities of chosen tokens.
        guided_decoding: The older name of structured_outputs: a `GuidedDecodingParams`.
        structured_outputs: What the output must follow, such as a JSON schema: a
            `StructuredOutputsParams`, or a mapping of its fields. Where only an end-of-sequence
            token may follow, min_tokens does not forbid it.
        extra_args, flat_logprobs, skip_reading_prefix_cache, thinking_token_budget,
            repetition_detection: vLLM's; not available yet, but None, False and {} are accepted.
        skip_clone: Without effect: a request always keeps a copy.

    Raises:
        SamplingError: A field is out of range or contradicts another one.
    """

    n: int = 1
    best_of: int | None = None
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = -1
    min_p: float = 0.0
    seed: int | None = None
    use_beam_search: bool = False
    length_penalty: float = 1.0
    early_stopping: bool | str = False
    stop: str | Sequence[str] | None = None
    stop_token_ids: Sequence[int] | None = None
    ignore_eos: bool = False
    max_tokens: int | None = 16
    min_tokens: int = 0
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    detokenize: bool = True
    skip_special_tokens: bool = True
    spaces_between_special_tokens: bool = True
    logits_processors: Sequence[Callable[..., Any]] | None = None
    include_stop_str_in_output: bool = False
    truncate_prompt_tokens: int | None = None
    no_repeat_ngram_size: int = 0
    logit_bias: Mapping[int, float] | None = None
    bad_words: Sequence[str] | None = None
    allowed_token_ids: Sequence[int] | None = None
    output_kind: RequestOutputKind = RequestOutputKind.CUMULATIVE
    num_speculative_tokens: int | None = None
    truncation_side: str = "left"
    logprob_token_ids: Any = None
    guided_decoding: GuidedDecodingParams | None = None
    structured_outputs: StructuredOutputsParams | None = None
    extra_args: InitVar[Any] = None
    flat_logprobs: InitVar[Any] = None
    skip_reading_prefix_cache: InitVar[Any] = None
    thinking_token_budget: InitVar[Any] = None
    repetition_detection: InitVar[Any] = None
    skip_clone: InitVar[bool] = False

    def __post_init__(
        self,
        extra_args: Any,
        flat_logprobs: Any,
        skip_reading_prefix_cache: Any,
        thinking_token_budget: Any,
        repetition_detection: Any,
        skip_clone: bool,
    ) -> None:
        for name, value in (
            ("extra_args", extra_args),
            ("flat_logprobs", flat_logprobs),
            ("skip_reading_prefix_cache", skip_reading_prefix_cache),
            ("thinking_token_budget", thinking_token_budget),
            ("repetition_detection", repetition_detection),
        ):
            if value is not None and value is not False and value != {}:
                _fail(name, value, f"{_NOT_YET_GIVEN[name]} is not available yet")
        self.check()

    @staticmethod
    def from_optional(**given: Any) -> SamplingParams:
        """The parameters given by name; None stands for the default, except for `max_tokens`."""
        return SamplingParams(
            **{k: v for k, v in given.items() if v is not None or k == "max_tokens"}
        )

    def clone(self) -> SamplingParams:
        """A copy with lists of its own, not checked. Logits processors are shared."""
        copy = object.__new__(SamplingParams)
        for name in _FIELDS:
            value = getattr(self, name)
            setattr(copy, name, value.copy() if type(value) in (list, dict) else value)
        return copy

    def checked_copy(self) -> SamplingParams:
        """What a request keeps: a copy of its own.

        Raises:
            SamplingError: a field that was assigned is wrong.
        """
        copy = self.clone()
        copy.check()
        return copy

    def check(self) -> None:
        """Brings the fields into one form (lists, plain numbers) and checks them.

        Raises:
            SamplingError: A field is out of range or contradicts another one.
        """
        self._normalise()
        self._check_numbers()
        self._check_lists()
        for name, feature in _NOT_YET.items():
            if getattr(self, name) is not None:
                _fail(name, getattr(self, name), f"{feature} is not available yet")
        self._check_structured_outputs()
        if self.use_beam_search:
            self._check_beam_search()
        elif self.early_stopping is not False:
            _fail("early_stopping", self.early_stopping, "needs use_beam_search=True")
        elif self.length_penalty != 1.0:
            _fail("length_penalty", self.length_penalty, "needs use_beam_search=True")

    @property
    def width(self) -> int:
        """Sequences generated for the prompt."""
        return self.n if self.best_of is None else self.best_of

    @property
    def greedy(self) -> bool:
        return self.temperature < GREEDY_TEMPERATURE

    @property
    def constrains(self) -> bool:
        """Whether the output must follow a grammar."""
        return self.structured_outputs is not None or self.guided_decoding is not None

    @property
    def ranks_by_logprob(self) -> bool:
        """More sequences are generated than returned."""
        return not self.use_beam_search and self.width > self.n

    def _normalise(self) -> None:
        if isinstance(self.stop, str):
            self.stop = [self.stop]
        for name in ("stop", "stop_token_ids", "bad_words"):
            value = getattr(self, name)
            setattr(self, name, [] if value is None else _as_list(name, value))
        for name in ("allowed_token_ids", "logits_processors"):
            value = getattr(self, name)
            if value is not None:
                setattr(self, name, _as_list(name, value))
        if not isinstance(self.output_kind, RequestOutputKind):
            _fail("output_kind", self.output_kind, "must be a RequestOutputKind")
        if self.logit_bias is not None:
            self.logit_bias = _checked_bias(self.logit_bias)
        for name in ("logprobs", "prompt_logprobs"):
            value = getattr(self, name)
            if isinstance(value, bool):
                setattr(self, name, 1 if value else None)
        if self.seed == -1:
            self.seed = None
        if self.truncation_side not in ("left", "right"):
            _fail("truncation_side", self.truncation_side, 'must be "left" or "right"')

    def _check_numbers(self) -> None:
        self.n = _integer("n", self.n, 1)
        if self.best_of is not None:
            self.best_of = _integer("best_of", self.best_of, 1)
            if self.best_of < self.n:
                _fail("best_of", self.best_of, f"must be at least n ({self.n})")
        for name in ("presence_penalty", "frequency_penalty"):
            setattr(self, name, _number(name, getattr(self, name), -2.0, 2.0))
        self.repetition_penalty = _number(
            "repetition_penalty", self.repetition_penalty, 0.0, math.inf, open_low=True
        )
        self.temperature = _number("temperature", self.temperature, 0.0, math.inf)
        self.top_p = _number("top_p", self.top_p, 0.0, 1.0, open_low=True)
        self.top_k = _integer("top_k", self.top_k, -1)
        self.min_p = _number("min_p", self.min_p, 0.0, 1.0)
        self.length_penalty = _number("length_penalty", self.length_penalty, -math.inf, math.inf)
        self.min_tokens = _integer("min_tokens", self.min_tokens, 0)
        self.no_repeat_ngram_size = _integer("no_repeat_ngram_size", self.no_repeat_ngram_size, 0)
        for name, low, high in _OPTIONAL_INTEGERS:
            value = getattr(self, name)
            if value is not None:
                setattr(self, name, _integer(name, value, low, high))
        if self.max_tokens is not None and self.min_tokens > self.max_tokens:
            _fail("min_tokens", self.min_tokens, f"exceeds max_tokens ({self.max_tokens})")
        cut = self.truncate_prompt_tokens
        if cut is not None and cut != -1 and cut < 1:
            _fail("truncate_prompt_tokens", cut, "must be at least 1, or -1")
        for name in _BOOLEANS:
            setattr(self, name, _boolean(name, getattr(self, name)))

    def _check_lists(self) -> None:
        assert self.stop is not None and self.bad_words is not None
        assert self.stop_token_ids is not None
        for name, words in (("stop", self.stop), ("bad_words", self.bad_words)):
            for word in words:
                if not isinstance(word, str) or not word:
                    _fail(name, word, "must be non-empty strings")
                if not is_text(word):
                    _fail(name, word, "holds half a surrogate pair, which is no text")
        if self.stop and not self.detokenize:
            _fail("stop", self.stop, "stop strings need detokenize=True")
        self.stop_token_ids = [_integer("stop_token_ids", one, 0) for one in self.stop_token_ids]
        if self.allowed_token_ids is not None:
            if not self.allowed_token_ids:
                _fail("allowed_token_ids", self.allowed_token_ids, "must not be empty")
            self.allowed_token_ids = [
                _integer("allowed_token_ids", one, 0) for one in self.allowed_token_ids
            ]
        for processor in self.logits_processors or ():
            if not callable(processor):
                _fail("logits_processors", processor, "must be callables")

    def _check_structured_outputs(self) -> None:
        if self.guided_decoding is not None:
            guided = StructuredOutputsParams.of(self.guided_decoding, "guided_decoding")
            if self.structured_outputs is not None:
                _fail("guided_decoding", self.guided_decoding, "contradicts structured_outputs")
            self.guided_decoding, self.structured_outputs = None, guided
        elif self.structured_outputs is not None:
            value = self.structured_outputs
            self.structured_outputs = StructuredOutputsParams.of(value, "structured_outputs")

    def _check_beam_search(self) -> None:
        if self.width < 2:
            _fail("best_of", self.best_of, "the beam width must be at least 2")
        if not self.greedy:
            _fail("temperature", self.temperature, "must be 0 with use_beam_search")
        if self.top_p < 1.0:
            _fail("top_p", self.top_p, "must be 1 with use_beam_search")
        if self.top_k > 0:
            _fail("top_k", self.top_k, "must be -1 with use_beam_search")
        if self.min_p > 0.0:
            _fail("min_p", self.min_p, "must be 0 with use_beam_search")
        if self.early_stopping not in (True, False, "never"):
            _fail("early_stopping", self.early_stopping, 'must be True, False or "never"')


@dataclass(slots=True)
class BeamSearchParams:
    """Parameters of `LLM.beam_search`; see the fields of `SamplingParams`.

    Args:
        beam_width: Sequences that are searched with, and returned.
        temperature: 0; another one is not available yet.
    """

    beam_width: int
    max_tokens: int
    ignore_eos: bool = False
    temperature: float = 0.0
    length_penalty: float = 1.0
    include_stop_str_in_output: bool = False
    structured_outputs: Any = None

    def sampling_params(self) -> SamplingParams:
        """The same search as a request's parameters. A single beam is greedy decoding.

        Raises:
            SamplingError: a field is wrong.
        """
        width = _integer("beam_width", self.beam_width, 1)
        if _number("temperature", self.temperature, 0.0, math.inf) >= GREEDY_TEMPERATURE:
            _fail("temperature", self.temperature, "beam search with it is not available yet")
        search: dict[str, Any] = {}
        if width > 1:
            search = {"use_beam_search": True, "length_penalty": self.length_penalty}
        return SamplingParams(
            n=width,
            temperature=0.0,
            ignore_eos=self.ignore_eos,
            max_tokens=_integer("max_tokens", self.max_tokens, 1),
            logprobs=0,
            include_stop_str_in_output=self.include_stop_str_in_output,
            structured_outputs=self.structured_outputs,
            **search,
        )


_FIELDS = tuple(field.name for field in fields(SamplingParams))
_OPTIONAL_INTEGERS = (
    ("seed", 0, MAX_SEED),
    ("max_tokens", 1, None),
    ("logprobs", -1, None),
    ("prompt_logprobs", -1, None),
    ("truncate_prompt_tokens", None, None),
    ("num_speculative_tokens", 0, None),
)
_NOT_YET = {
    "logprob_token_ids": "asking for the log-probabilities of chosen tokens",
}
_NOT_YET_GIVEN = {
    "extra_args": "an argument for a processor of one's own",
    "flat_logprobs": "another form of log-probabilities",
    "skip_reading_prefix_cache": "a request that leaves cached prefixes alone",
    "thinking_token_budget": "a limit on the tokens of reasoning",
    "repetition_detection": "ending a text that repeats itself",
}
"""Parameters that `SamplingParams` takes and does not keep."""
_BOOLEANS = (
    "use_beam_search",
    "ignore_eos",
    "detokenize",
    "skip_special_tokens",
    "spaces_between_special_tokens",
    "include_stop_str_in_output",
)


def is_text(value: str) -> bool:
    """Whether UTF-8 can hold the string: JSON's escapes can make strings that it cannot."""
    if value.isascii():
        return True
    try:
        value.encode()
    except UnicodeEncodeError:
        return False
    return True


def _fail(field: str, value: Any, reason: str) -> NoReturn:
    raise SamplingError(field, value, reason)


def _as_list(field: str, value: Any) -> list[Any]:
    if (type(value).__module__, type(value).__name__) == ("numpy", "ndarray") and value.ndim == 1:
        return list(value)
    if isinstance(value, (str, bytes)) or not isinstance(value, (Sequence, Set)):
        _fail(field, value, "must be a list")
    return list(value)


def _boolean(field: str, value: Any) -> bool:
    if isinstance(value, bool):
        return value
    if (type(value).__module__, type(value).__name__) in (("numpy", "bool"), ("numpy", "bool_")):
        return bool(value)
    if type(value) is int and value in (0, 1):  # as over HTTP
        return value == 1
    _fail(field, value, "must be True or False")


def _integer(field: str, value: Any, low: int | None, high: int | None = None) -> int:
    if type(value) is not int:
        if isinstance(value, bool) or not isinstance(value, Integral):
            _fail(field, value, "must be an integer")
        value = int(value)
    if low is not None and value < low:
        _fail(field, value, f"must be at least {low}")
    if high is not None and value > high:
        _fail(field, value, f"must be at most {high}")
    return value


def _number(field: str, value: Any, low: float, high: float, *, open_low: bool = False) -> float:
    if type(value) is not float and type(value) is not int:
        if isinstance(value, bool) or not isinstance(value, Real):
            _fail(field, value, "must be a number")
        value = int(value) if isinstance(value, Integral) else float(value)
    if type(value) is int and abs(value) > _LARGEST_INTEGER or not math.isfinite(value):
        _fail(field, value, "must be finite")
    if value < low or (open_low and value == low):
        _fail(field, value, f"must be {'above' if open_low else 'at least'} {low:g}")
    if value > high:
        _fail(field, value, f"must be at most {high:g}")
    return value


def _checked_bias(bias: Any) -> dict[int, float]:
    if not isinstance(bias, Mapping):
        _fail("logit_bias", bias, "must map token ids to numbers")
    checked: dict[int, float] = {}
    for key, value in bias.items():
        try:
            token = int(key)  # JSON objects have string keys
        except (TypeError, ValueError):
            _fail("logit_bias", key, "keys must be token ids")
        _integer("logit_bias", token, 0)
        checked[token] = float(_number("logit_bias", value, -100.0, 100.0))
    return checked
