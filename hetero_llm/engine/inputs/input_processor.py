"""From a user's prompt and parameters to a checked `Request`: all mistakes are found here, before
any work starts."""

from __future__ import annotations

import struct
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import count
from numbers import Integral
from typing import Any

import numpy as np

from hetero_llm.config.engine_config import ConstraintsConfig
from hetero_llm.config.prompt_adapter_config import PromptAdapterConfig
from hetero_llm.core.errors import PromptError, RequestError, SamplingError
from hetero_llm.core.grammar import Grammar
from hetero_llm.core.images import PromptImages
from hetero_llm.core.lora import AdapterRef, LoRARequest, pair_requests
from hetero_llm.core.outputs import RequestMetrics
from hetero_llm.core.prompt_adapter import (
    VIRTUAL_TOKEN,
    PromptAdapterRequest,
    pair_prompt_adapters,
)
from hetero_llm.core.request import Request
from hetero_llm.core.sampling_params import SamplingParams, is_text
from hetero_llm.core.structured_outputs import GuidedDecodingRequest
from hetero_llm.engine.inputs.constraint_defaults import ConstraintDefaults
from hetero_llm.engine.inputs.images import FIELD, ImageInputs, given_images
from hetero_llm.engine.inputs.prompt_adapters import PromptAdapters
from hetero_llm.engine.text.tokenizer import Tokenizer
from hetero_llm.kv_cache.prefix_cache import hash_root, token_bytes
from hetero_llm.scheduler.beam_search import candidates_needed
from hetero_llm.structured_output.compiler import GrammarCompiler

_PROMPT_KEYS = frozenset({"prompt", "prompt_token_ids", "cache_salt", "multi_modal_data"})
_LATER_KEYS = {
    "mm_processor_kwargs": "another treatment of images than the model's own",
    "multi_modal_uuids": "images under names of one's own",
    "prompt_embeds": "a prompt of embeddings",
    "encoder_prompt": "a prompt of an encoder",
    "decoder_prompt": "a prompt of an encoder",
}
"""vLLM's other keys, which may be None or empty."""
_MASK = (1 << 64) - 1


@dataclass(frozen=True, slots=True)
class Prompt:
    """One prompt: text, or token ids, and an optional prefix-cache namespace (`cache_salt`).

    `images` are a user's images, one for each image token. Once they are prepared, `prepared` has
    them instead, and `token_ids` holds all their tokens.
    """

    text: str | None = None
    token_ids: list[int] | None = None
    cache_salt: str | None = None
    images: tuple[Any, ...] = ()
    prepared: PromptImages | None = None


def parse_prompts(prompts: Any, prompt_token_ids: Any = None) -> list[Prompt]:
    """Converts the forms that `LLM.generate` accepts.

    A string, a dict (`{"prompt": ...}` or `{"prompt_token_ids": ...}`, both with an optional
    "cache_salt" and "multi_modal_data"), token ids (a list or an array), or a list of those; or
    `prompt_token_ids=` as token ids or a list of such.

    Raises:
        PromptError: anything else, naming the prompt's index in a list.
    """
    if prompts is None and prompt_token_ids is None:
        raise PromptError("prompts", None, "prompts or prompt_token_ids is needed")
    if prompts is None:
        ids = _without_array(prompt_token_ids)
        if not isinstance(ids, Sequence) or isinstance(ids, str):
            raise PromptError("prompt_token_ids", ids, "must be a list")
        if is_one_prompt(None, ids):
            return [_parse_one({"prompt_token_ids": ids}, None)]
        return [_parse_one({"prompt_token_ids": each}, i) for i, each in enumerate(ids)]
    prompts = _without_array(prompts)
    if is_one_prompt(prompts):
        parsed = [_parse_one(prompts, None)]
    elif isinstance(prompts, Sequence):
        parsed = [_parse_one(item, index) for index, item in enumerate(prompts)]
    else:
        raise PromptError("prompts", prompts, "must be a string, a dict or a list of those")
    if prompt_token_ids is None:
        return parsed
    given = parse_prompts(None, prompt_token_ids)
    if len(given) != len(parsed):
        raise PromptError(
            "prompt_token_ids", f"{len(given)} lists", f"there are {len(parsed)} prompts"
        )
    return [
        Prompt(text.text, ids.token_ids, text.cache_salt, text.images)
        for text, ids in zip(parsed, given, strict=True)
    ]


def is_one_prompt(prompts: Any, prompt_token_ids: Any = None) -> bool:
    """Whether `parse_prompts` takes its arguments as one prompt, not as a list of prompts."""
    if prompts is None:
        ids = _without_array(prompt_token_ids)
        return not ids or _begins_with_a_number(ids)
    return isinstance(prompts, (str, Mapping)) or _begins_with_a_number(_without_array(prompts))


def _begins_with_a_number(value: Any) -> bool:
    return isinstance(value, Sequence) and bool(value) and isinstance(value[0], Integral)


def _without_array(value: Any) -> Any:
    """An array (numpy's, torch's, Python's) as a list, anything else as it is."""
    return value.tolist() if hasattr(value, "tolist") else value


def parse_prompt(prompt: Any) -> Prompt:
    """One prompt in any of the forms of `parse_prompts`, or a `Prompt`, whose types are checked.

    Raises:
        PromptError: anything else.
    """
    if isinstance(prompt, Prompt):
        fields = {
            "prompt": prompt.text,
            "prompt_token_ids": prompt.token_ids,
            "cache_salt": prompt.cache_salt,
        }
        given = {name: value for name, value in fields.items() if value is not None}
        return replace(_parse_one(given, None), images=prompt.images, prepared=prompt.prepared)
    prompt = _without_array(prompt)
    if not is_one_prompt(prompt):
        reason = "must be a string, a mapping, a list of token ids or a Prompt"
        raise PromptError("prompt", prompt, reason)
    return _parse_one(prompt, None)


def _parse_one(item: Any, index: int | None) -> Prompt:
    item = _without_array(item)
    if isinstance(item, str):
        return Prompt(text=item)
    if _begins_with_a_number(item):
        item = {"prompt_token_ids": item}
    if isinstance(item, Mapping):
        item = _without_empty_keys(item, index)
        unknown = sorted(set(item) - _PROMPT_KEYS, key=str)
        if unknown:
            raise PromptError(
                unknown[0], item[unknown[0]], "is not supported in a prompt", prompt_index=index
            )
        ids = _without_array(item.get("prompt_token_ids"))
        text = item.get("prompt")
        salt = item.get("cache_salt")
        if ids is None and not isinstance(text, str):
            raise PromptError("prompt", text, "must be a string", prompt_index=index)
        if salt is not None and (not isinstance(salt, str) or not salt):
            raise PromptError("cache_salt", salt, "must be a string", prompt_index=index)
        if ids is not None:
            if not isinstance(ids, Sequence) or isinstance(ids, str):
                raise PromptError("prompt_token_ids", ids, "must be a list", prompt_index=index)
            ids = ids if type(ids) is list else list(ids)  # copying a long one takes time
        try:
            images = given_images(item.get("multi_modal_data"))
        except PromptError as error:
            raise (error if index is None else error.at_prompt(index)) from None
        return Prompt(text, ids, salt, images)
    reason = "must be a string, a dict or a list of token ids"
    raise PromptError("prompt", item, reason, prompt_index=index)


def _without_empty_keys(item: Mapping[str, Any], index: int | None) -> Mapping[str, Any]:
    """A prompt without the keys of `_LATER_KEYS`.

    Raises:
        PromptError: one of them has a value.
    """
    later = [name for name in _LATER_KEYS if name in item]
    for name in later:
        value = item[name]
        if value is not None and not (isinstance(value, Mapping) and not value):
            reason = f"{_LATER_KEYS[name]} is not available yet"
            raise PromptError(name, value, reason, prompt_index=index)
    return {name: item[name] for name in item if name not in later} if later else item


class InputProcessor:
    """Turns prompts and parameters into requests.

    Args:
        tokenizer: None if the engine was started without one.
        vocab_size: number of logits.
        max_model_len: longest sequence in tokens.
        eos_ids: end-of-sequence tokens of the model.
        max_logprobs: most log-probabilities a request may ask for; -1 is no limit.
        seed: of the engine; requests without a seed derive theirs from it.
        images: prepares the images of prompts; None if the model takes none.
        grammars: compiles the constraints of outputs; None without a tokenizer.
        constraints: what holds for all of them.
        prompt_adapters: those that requests may have; None: they may have none.
        takes_processors: requests may have logits processors, which are Python functions.
    """

    def __init__(
        self,
        tokenizer: Tokenizer | None,
        *,
        vocab_size: int,
        max_model_len: int,
        eos_ids: tuple[int, ...],
        max_logprobs: int,
        seed: int,
        images: ImageInputs | None = None,
        grammars: GrammarCompiler | None = None,
        constraints: ConstraintsConfig | None = None,
        prompt_adapters: PromptAdapters | None = None,
        takes_processors: bool = True,
    ) -> None:
        self._takes_processors = takes_processors
        self._grammars = grammars
        self._constraints = ConstraintDefaults(tokenizer, constraints or ConstraintsConfig())
        self._tokenizer = tokenizer
        self._vocab_size = vocab_size
        self._max_model_len = max_model_len
        self._eos_ids = frozenset(eos_ids)
        self._max_logprobs = max_logprobs
        self._seed = seed
        self._images = images
        self.prompt_adapters = prompt_adapters or PromptAdapters(PromptAdapterConfig(), size=0)
        self._numbers = count(1)  # of requests; `next` is safe in several threads

    def make_request(
        self,
        request_id: str,
        prompt: Prompt,
        params: SamplingParams,
        adapter: AdapterRef | None = None,
        prompt_adapter: PromptAdapterRequest | None = None,
        *,
        check_grammar: bool = True,
    ) -> Request:
        """Builds a request. Its prompt adapter is read unless it is in memory.

        Args:
            adapter: of the engine's; cached prefixes and drafts are kept apart by its content, and
                by that of `prompt_adapter`.
            check_grammar: False: `check_grammar` follows, which takes milliseconds for a schema
                of 10 KB.

        Raises:
            RequestError: the prompt or a parameter cannot be served by this engine.
        """
        if not isinstance(params, SamplingParams):
            raise SamplingError("sampling_params", params, "must be a SamplingParams")
        params = params.checked_copy()
        self._check_params(params)
        for field, text in (("prompt", prompt.text), ("cache_salt", prompt.cache_salt)):
            if text is not None and not is_text(text):
                raise PromptError(field, text, "holds half a surrogate pair, which is no text")
        virtual = None
        if prompt_adapter is not None:
            virtual = self.prompt_adapters.open(prompt_adapter)
        num_virtual = 0 if virtual is None else virtual.num_tokens
        token_ids, packed, images = self._tokens_and_images(prompt, params, num_virtual)
        grammar = self._grammar(params, token_ids, check=check_grammar)
        end_ids = frozenset() if params.ignore_eos else self._eos_ids
        end_ids |= frozenset(params.stop_token_ids or ())
        limit = self._max_model_len
        if params.max_tokens is not None:
            limit = min(limit, num_virtual + len(token_ids) + params.max_tokens)
        num_logprobs = self._count(params.logprobs)
        if num_logprobs is None and params.ranks_by_logprob:
            num_logprobs = 0
        if params.use_beam_search:
            needed = candidates_needed(params.width, len(end_ids))
            num_logprobs = min(max(needed, num_logprobs or 0), self._vocab_size)
        extras: tuple[str, ...] = () if adapter is None else ("adapter", adapter.content_hash)
        if virtual is not None:
            extras += ("prompt_adapter", virtual.content_hash)
            token_ids = [VIRTUAL_TOKEN] * num_virtual + token_ids
            packed = token_bytes([VIRTUAL_TOKEN] * num_virtual) + packed
        if prompt.cache_salt is not None:
            extras += ("salt", prompt.cache_salt)
        if images is not None:
            extras += ("images", images.key)
        number = next(self._numbers)
        return Request(
            request_id=request_id,
            prompt=prompt.text,
            prompt_token_ids=token_ids,
            params=params,
            seed=self._derived_seed(number) if params.seed is None else params.seed,
            end_ids=end_ids,
            eos_ids=self._eos_ids - frozenset(params.stop_token_ids or ()),
            max_total_tokens=limit,
            root_hash=hash_root(extras),
            metrics=RequestMetrics(time.monotonic()),
            num_logprobs=num_logprobs,
            num_prompt_logprobs=self._count(params.prompt_logprobs) or 0,
            bad_word_ids=self._bad_word_ids(params),
            images=images if virtual is None else virtual.as_images(),
            grammar=grammar,
            adapter=adapter,
            packed_prompt=packed,
            num_virtual_tokens=num_virtual,
        )

    def writes_quickly(self, params: SamplingParams) -> bool:
        """Whether the constraint of parameters, if they have one, delays `make_request` without
        `check_grammar` by less than another thread would."""
        constraint = params.structured_outputs
        if constraint is None or self._grammars is None:
            return not params.constrains
        return self._grammars.writes_quickly(constraint)

    def checks_quickly(self, request: Request) -> bool:
        """Whether `check_grammar` has no grammar to compile."""
        grammar = request.grammar
        return grammar is None or self._grammars is None or self._grammars.knows(grammar)

    def check_grammar(self, request: Request) -> None:
        """Checks the constraint of a request that was made without.

        Raises:
            SamplingError: it cannot be followed.
        """
        constraint = request.params.structured_outputs
        if request.grammar is not None and constraint is not None and self._grammars is not None:
            applied = self._constraints.applied(constraint, request.shown_prompt_ids)
            self._grammars.check(request.grammar, applied)

    def _grammar(
        self, params: SamplingParams, prompt_ids: list[int], *, check: bool
    ) -> Grammar | None:
        """The grammar of a request's constraint.

        Raises:
            SamplingError: it cannot be followed.
        """
        constraint = params.structured_outputs
        if constraint is None:
            return None
        if self._grammars is None:
            reason = "needs a tokenizer (skip_tokenizer_init is set)"
            raise SamplingError("structured_outputs", constraint, reason)
        constraint = self._constraints.applied(constraint, prompt_ids)
        opens = constraint.may_begin_with
        for token in (*(constraint.begins_after or ()), *(() if opens is None else (opens,))):
            if token >= self._vocab_size:
                reason = f"is outside the vocabulary (0 to {self._vocab_size - 1})"
                raise SamplingError("structured_outputs", token, reason)
        grammars = self._grammars
        return grammars.grammar(constraint) if check else grammars.unchecked_grammar(constraint)

    def prepare_images(self, prompt: Prompt) -> Prompt:
        """The prompt with its images processed and their tokens in `token_ids`.

        Raises:
            PromptError: the model takes no images, an image cannot be used, or the prompt does not
                have one image token for each.
        """
        images = self._images
        if images is None:
            what = f"{len(prompt.images)} images"
            raise PromptError(FIELD, what, "this model takes no images")
        token_ids, prepared = images.prepare(self._encoded(prompt)[0], prompt.images)
        return replace(prompt, token_ids=token_ids, images=(), prepared=prepared)

    def _tokens_and_images(
        self, prompt: Prompt, params: SamplingParams, num_virtual: int
    ) -> tuple[list[int], bytes, PromptImages | None]:
        """`num_virtual`: virtual tokens that come before the prompt's own."""
        if prompt.images:
            prompt = self.prepare_images(prompt)
        prepared = prompt.prepared
        token_ids, packed = self._encoded(prompt)
        if self._images is not None:
            found = token_ids.count(self._images.token_id)
            placed = 0 if prepared is None else sum(one.count for one in prepared.items)
            if found != placed:
                raise PromptError(
                    "prompt",
                    f"{found} image tokens",
                    f"its images have {placed}; pass the images as {FIELD}",
                )
        wanted = params.truncate_prompt_tokens
        cut = self._max_model_len - 1 - num_virtual if wanted == -1 else wanted
        if cut is not None and cut < len(token_ids):
            if prepared is not None:
                raise SamplingError(
                    "truncate_prompt_tokens", wanted, "a prompt with images cannot be cut"
                )
            if cut <= 0:
                reason = f"max_model_len is {self._max_model_len}"
                if num_virtual:
                    reason += f" and {num_virtual} virtual tokens come before the prompt"
                raise SamplingError("truncate_prompt_tokens", wanted, reason)
            if params.truncation_side == "left":
                token_ids, packed = token_ids[-cut:], packed[-4 * cut :]
            else:
                token_ids, packed = token_ids[:cut], packed[: 4 * cut]
        if num_virtual + len(token_ids) >= self._max_model_len:
            before = f"with {num_virtual} virtual tokens before it and" if num_virtual else "with"
            raise PromptError(
                "prompt",
                f"{len(token_ids)} tokens",
                f"{before} one token to generate it exceeds max_model_len ({self._max_model_len})",
            )
        return token_ids, packed, prepared

    def _encoded(self, prompt: Prompt) -> tuple[list[int], bytes]:
        """The token ids of a prompt, as a list and as int32 bytes."""
        packed = None
        if prompt.token_ids is not None:
            token_ids = prompt.token_ids
            packed = _packed_plain_ids(token_ids, self._vocab_size)
            # A copy: outputs hold it, and the user's list may be that of several prompts.
            token_ids = self._plain_ids(token_ids) if packed is None else list(token_ids)
        else:
            assert prompt.text is not None
            if self._tokenizer is None:
                raise PromptError(
                    "prompt", prompt.text, "text needs a tokenizer (skip_tokenizer_init is set)"
                )
            if not prompt.text:
                raise PromptError("prompt", prompt.text, "is empty")
            token_ids = self._tokenizer.encode(prompt.text)
        if not token_ids:
            field = "prompt" if prompt.token_ids is None else "prompt_token_ids"
            value = prompt.text if prompt.token_ids is None else prompt.token_ids
            raise PromptError(field, value, "is empty (no tokens)")
        return token_ids, token_bytes(token_ids) if packed is None else packed

    def _plain_ids(self, token_ids: list[Any]) -> list[int]:
        """The ids as Python's integers; raises PromptError for the first wrong one."""
        for token in token_ids:
            if isinstance(token, bool) or not isinstance(token, Integral):
                raise PromptError("prompt_token_ids", token, "must be integers")
            if not 0 <= int(token) < self._vocab_size:
                raise PromptError(
                    "prompt_token_ids",
                    token,
                    f"is outside the vocabulary (0 to {self._vocab_size - 1})",
                )
        return [int(token) for token in token_ids]

    def _check_params(self, params: SamplingParams) -> None:
        if params.logits_processors and not self._takes_processors:
            reason = (
                "Python functions run in one process; tensor_parallel_size and "
                "sequence_parallel_size and pipeline_parallel_size have to be 1"
            )
            raise SamplingError("logits_processors", params.logits_processors, reason)
        for name in ("logprobs", "prompt_logprobs"):
            wanted = self._count(getattr(params, name))
            if wanted is not None and self._max_logprobs != -1 and wanted > self._max_logprobs:
                whole = f": the whole vocabulary ({wanted} tokens)" * (getattr(params, name) == -1)
                reason = f"exceeds max_logprobs ({self._max_logprobs}){whole}"
                raise SamplingError(name, getattr(params, name), reason)
        for name in ("stop_token_ids", "logit_bias", "allowed_token_ids"):
            for token in getattr(params, name) or ():
                if token >= self._vocab_size:
                    raise SamplingError(
                        name, token, f"is outside the vocabulary (0 to {self._vocab_size - 1})"
                    )
        if self._tokenizer is None:
            for name in ("stop", "bad_words"):
                if getattr(params, name):
                    raise SamplingError(
                        name,
                        getattr(params, name),
                        "needs a tokenizer (skip_tokenizer_init is set)",
                    )

    def _count(self, wanted: int | None) -> int | None:
        return self._vocab_size if wanted == -1 else wanted

    def _bad_word_ids(self, params: SamplingParams) -> tuple[tuple[int, ...], ...]:
        """Token sequences of each bad word, at the start of a text and after a space."""
        sequences: list[tuple[int, ...]] = []
        for word in params.bad_words or ():
            assert self._tokenizer is not None
            bare = tuple(self._tokenizer.encode(word.lstrip(), add_special_tokens=False))
            spaced = tuple(self._tokenizer.encode(" " + word.lstrip(), add_special_tokens=False))
            # As in vLLM: the spaced form counts only if the space is part of the first token.
            if bare and not word.startswith(" "):
                sequences.append(bare)
            if spaced and (word.startswith(" ") or len(spaced) == len(bare)):
                sequences.append(spaced)
        return tuple(dict.fromkeys(sequences))

    def _derived_seed(self, number: int) -> int:
        """SplitMix64 of (engine seed, request number): distinct streams, reproducible runs."""
        x = (self._seed * 0xD1342543DE82EF95 + number * 0x9E3779B97F4A7C15) & _MASK
        x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
        x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) & _MASK
        return x ^ (x >> 31)


def _packed_plain_ids(token_ids: list[int], vocab_size: int) -> bytes | None:
    """`token_bytes` if all ids are plain integers of the vocabulary, else None.

    A few passes in C: after a prefix hit, a Python loop over a long prompt would be a large part of
    the time to the first token.
    """
    try:
        # With any other type among the numbers the sum has another type too, except with booleans.
        if type(sum(token_ids)) is not int:
            return None
        packed = token_bytes(token_ids)
    except (TypeError, struct.error):  # not numbers, or of more than 32 bits
        return None
    unsigned = np.frombuffer(packed, "<u4")  # negative ids become huge ones
    if unsigned.max(initial=0) >= vocab_size:
        return None
    small = np.flatnonzero(unsigned < 2).tolist()
    return None if any(isinstance(token_ids[place], bool) for place in small) else packed


GuidedOptions = GuidedDecodingRequest | Mapping[str, Any]


def with_guided_options(
    params: Sequence[SamplingParams], given: GuidedOptions | Sequence[GuidedOptions]
) -> list[SamplingParams]:
    """The parameters of each prompt with vLLM's `guided_options_request` in them.

    Raises:
        RequestError: there is not one or one for each, or parameters have a constraint already.
    """
    if isinstance(given, (Mapping, GuidedDecodingRequest)):
        given = [given] * len(params)
    if not isinstance(given, Sequence) or len(given) != len(params):
        raise RequestError(
            "guided_options_request", given, f"must be one, or a list of {len(params)}"
        )
    joined = []
    for own, options in zip(params, given, strict=True):
        if own.constrains:
            reason = "contradicts the constraint of sampling_params"
            raise RequestError("guided_options_request", options, reason)
        guided = GuidedDecodingRequest.of(options).structured_outputs()
        joined.append(replace(own, structured_outputs=guided))
    return joined


def pair_params(params: Any, count: int) -> list[SamplingParams]:
    """One `SamplingParams` for all prompts, or a list of as many."""
    if isinstance(params, SamplingParams):
        return [params] * count
    if not isinstance(params, Sequence) or len(params) != count:
        raise RequestError(
            "sampling_params", params, f"must be one SamplingParams or a list of {count}"
        )
    return list(params)


BothAdapters = tuple[LoRARequest | None, PromptAdapterRequest | None]


def pair_both_adapters(lora: Any, prompt: Any, count: int) -> list[BothAdapters]:
    """The LoRA adapter and the prompt adapter of each prompt; see `pair_requests`."""
    adapters = pair_requests(lora, count, LoRARequest, "lora_request")
    return list(zip(adapters, pair_prompt_adapters(prompt, count), strict=True))
