"""From texts, pairs of texts and token ids to checked inputs of a pooling model.

Texts are tokenized together: the tokenizers library spreads a batch over threads and leaves the
interpreter lock to others. What is too long is cut here and not by the tokenizer, whose own
switch for that is shared by all threads.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np

from hetero_llm.core.errors import PoolingError, PromptError
from hetero_llm.core.pooling import Finish, PoolingInput
from hetero_llm.core.pooling_params import CLASSIFY, EMBED, SCORE, PoolingParams
from hetero_llm.core.sampling_params import is_text
from hetero_llm.engine.inputs.input_processor import Prompt
from hetero_llm.engine.text.tokenizer import Tokenizer
from hetero_llm.pooling.pooling_model import PoolingModel

Text = str | tuple[str, str]

_CUT_CONTEXTS = 8
"""A text that will be cut is first cut to the characters of this many contexts of the longest
token, so that a huge one takes no time."""


class PoolingInputs:
    """Checks and tokenizes the inputs of one model. Any number of threads may call it.

    Args:
        tokenizer: None if the engine was started without one.

    Attributes:
        model: see Args.
    """

    def __init__(self, tokenizer: Tokenizer | None, model: PoolingModel) -> None:
        self._tokenizer = tokenizer
        self.model = model
        self._backend = None
        self._longest_token = 1
        self._segments = False
        if tokenizer is not None:
            tokenizer.encode("a")  # switches cutting and padding off that tokenizer.json asks for
            self._backend = getattr(tokenizer.hf, "backend_tokenizer", None)
            names = getattr(tokenizer.hf, "model_input_names", ())
            self._segments = model.has_segments and "token_type_ids" in names
            self._longest_token = max(map(len, tokenizer.hf.get_vocab()), default=1)

    def finish_of(self, params: PoolingParams, task: str) -> Finish:
        """What becomes of the pooled values.

        Args:
            task: of the call; `params.task` may not name another one.

        Raises:
            PoolingError: the model does not serve the task, or a field does not fit it.
        """
        model = self.model
        if not isinstance(params, PoolingParams):
            raise PoolingError("pooling_params", params, "must be a PoolingParams")
        params.check()
        if params.task is not None and params.task != task:
            raise PoolingError("task", params.task, f"this call is for the task {task!r}")
        self.check_task(task)
        if task == EMBED or not model.is_classifier:
            if params.use_activation is not None:
                raise PoolingError("use_activation", params.use_activation, "is for classifiers")
            normalize = model.normalize if params.normalize is None else params.normalize
            return Finish(self._dimensions(params), normalize)
        for name in ("normalize", "dimensions"):
            value = getattr(params, name)
            if value is not None:
                raise PoolingError(name, value, "is for embeddings; this model classifies")
        wanted = params.use_activation
        wanted = model.use_activation if wanted is None else wanted
        activation = model.score_activation if task == SCORE else model.activation
        return Finish(activation=activation if wanted else "")

    def check_task(self, task: str) -> None:
        """Raises PoolingError: the model does not serve the task."""
        model = self.model
        if task in model.tasks:
            return
        reason = f"this model serves {' and '.join(map(repr, model.tasks))}"
        if task == SCORE:
            reason += f": a score needs a classifier of one class, it has {len(model.labels)}"
        elif task == CLASSIFY:
            reason += "; a model for classes has a class that ends in ForSequenceClassification"
        raise PoolingError("task", task, reason)

    def prompts(
        self,
        prompts: Sequence[Prompt],
        params: Sequence[PoolingParams],
        *,
        name_index: bool,
        field: str = "prompt",
        add_special_tokens: bool = True,
    ) -> list[PoolingInput]:
        """The inputs of prompts, each a text or token ids.

        Args:
            params: one for each prompt.
            name_index: errors name the prompt's place in the list.
            field: what errors call the prompts.
            add_special_tokens: put the tokenizer's special tokens around texts.

        Raises:
            PromptError, PoolingError: a prompt cannot be served.
        """
        inputs: list[PoolingInput | None] = [None] * len(prompts)
        places, texts = [], []
        for place, (prompt, one) in enumerate(zip(prompts, params, strict=True)):
            with _naming(field, place if name_index else None):
                if prompt.images or prompt.prepared is not None:
                    raise PromptError("multi_modal_data", "images", "this model takes no images")
                if prompt.token_ids is None:
                    text = self._checked_text(prompt.text, one)
                    places.append(place)
                    texts.append(self._prefix(one) + text)
                else:
                    inputs[place] = self._of_ids(prompt.token_ids, one)
        for place, made in zip(places, self._encode(texts, add_special_tokens), strict=True):
            with _naming(field, place if name_index else None):
                inputs[place] = self._of_encoding(made, params[place])
        return [one for one in inputs if one is not None]

    def pairs(
        self,
        pairs: Sequence[tuple[str, str]],
        params: PoolingParams,
        *,
        name_index: bool,
        field: str = "prompt",
        add_special_tokens: bool = True,
    ) -> list[PoolingInput]:
        """The inputs of pairs of texts, for a cross-encoder; arguments as of `prompts`.

        Raises:
            PromptError, PoolingError: a pair cannot be served.
        """
        checked = []
        for place, pair in enumerate(pairs):
            with _naming(field, place if name_index else None):
                checked.append(
                    (self._checked_text(pair[0], params), self._checked_text(pair[1], params))
                )
        inputs = []
        for place, made in enumerate(self._encode(checked, add_special_tokens)):
            with _naming(field, place if name_index else None):
                inputs.append(self._of_encoding(made, params))
        return inputs

    def _dimensions(self, params: PoolingParams) -> int:
        wanted, model = params.dimensions, self.model
        if wanted is None:
            return model.dimensions
        if not model.matryoshka:
            reason = (
                "this model's embeddings cannot be cut; if it was trained for that, say so with "
                'hf_overrides={"is_matryoshka": true}'
            )
            raise PoolingError("dimensions", wanted, reason)
        if model.matryoshka_dimensions and wanted not in model.matryoshka_dimensions:
            known = ", ".join(map(str, model.matryoshka_dimensions))
            raise PoolingError("dimensions", wanted, f"must be one of {known}")
        if wanted > model.embedding_size:
            reason = f"the model's embeddings have {model.embedding_size} entries"
            raise PoolingError("dimensions", wanted, reason)
        return wanted

    def _prefix(self, params: PoolingParams) -> str:
        model, name = self.model, params.prompt_name
        name = model.default_prompt if name is None else name
        if not name:
            return ""
        if name not in model.prompts:
            known = ", ".join(map(repr, model.prompts)) or "none"
            raise PoolingError("prompt_name", name, f"the model's prompts are {known}")
        return model.prompts[name]

    def _checked_text(self, text: str | None, params: PoolingParams) -> str:
        if not isinstance(text, str):
            raise PromptError("prompt", text, "must be a string")
        if self._tokenizer is None:
            raise PromptError("prompt", text, "text needs a tokenizer (skip_tokenizer_init is set)")
        if not text:
            raise PromptError("prompt", text, "is empty")
        if not is_text(text):
            raise PromptError("prompt", text, "holds half a surrogate pair, which is no text")
        limit = self._limit(params)
        if limit is not None:
            most = _CUT_CONTEXTS * limit * self._longest_token
            text = text[-most:] if self._cuts_left(params) else text[:most]
        return text.lower() if self.model.lower_case else text

    def _encode(self, texts: Sequence[Text], add_special_tokens: bool) -> Sequence[Any]:
        """An encoding of the tokenizers library for each text or pair."""
        if not texts:
            return []
        if self._backend is not None:
            made: Sequence[Any] = self._backend.encode_batch(
                list(texts), add_special_tokens=add_special_tokens
            )
            return made
        assert self._tokenizer is not None
        hf = self._tokenizer.hf
        return [_SlowEncoding(hf, text, add_special_tokens) for text in texts]

    def _limit(self, params: PoolingParams) -> int | None:
        """Tokens that an input is cut to; None: it is not."""
        wanted, longest = params.truncate_prompt_tokens, self.model.max_model_len
        if wanted is None:
            return None
        if wanted > longest:
            reason = f"must be at most max_model_len ({longest})"
            raise PoolingError("truncate_prompt_tokens", wanted, reason)
        return longest if wanted == -1 else wanted

    def _cuts_left(self, params: PoolingParams) -> bool:
        side = params.truncation_side
        if side is None and self._tokenizer is not None:
            side = getattr(self._tokenizer.hf, "truncation_side", None)
        return side == "left"

    def _of_encoding(self, made: Any, params: PoolingParams) -> PoolingInput:
        ids = np.array(made.ids, np.int32)
        kinds = np.array(made.type_ids if self._segments else [0] * len(ids), np.uint8)
        limit = self._limit(params)
        if limit is not None and len(ids) > limit:
            kept = _kept(made.sequence_ids, limit, left=self._cuts_left(params))
            ids, kinds = ids[kept], kinds[kept]
        if not len(ids):
            raise PromptError("prompt", "0 tokens", "is empty (no tokens)")
        return self._checked(PoolingInput(ids, kinds if kinds.any() else None), params)

    def _of_ids(self, token_ids: Sequence[Any], params: PoolingParams) -> PoolingInput:
        if not token_ids:
            raise PromptError("prompt_token_ids", token_ids, "is empty (no tokens)")
        size = self.model.vocab_size
        for token in token_ids:
            if type(token) is not int:
                raise PromptError("prompt_token_ids", token, "must be integers")
            if not 0 <= token < size:
                reason = f"is outside the vocabulary (0 to {size - 1})"
                raise PromptError("prompt_token_ids", token, reason)
        limit = self._limit(params)
        if limit is not None and len(token_ids) > limit:
            token_ids = token_ids[-limit:] if self._cuts_left(params) else token_ids[:limit]
        return self._checked(PoolingInput(np.array(token_ids, np.int32)), params)

    def _checked(self, made: PoolingInput, params: PoolingParams) -> PoolingInput:
        longest = self.model.max_model_len
        if len(made) > longest:
            raise PromptError(
                "prompt", f"{len(made)} tokens",
                f"exceeds max_model_len ({longest}); truncate_prompt_tokens=-1 cuts it",
            )  # fmt: skip
        return made


@contextmanager
def _naming(field: str, place: int | None) -> Iterator[None]:
    """Gives errors the field's name and the place of the prompt, if it is one of several."""
    try:
        yield
    except PoolingError as error:
        raise (error if place is None else error.at_prompt(place)) from None
    except PromptError as error:
        ours = error.field == "prompt" or (error.field == "prompt_token_ids" and field != "prompt")
        name = field if ours else error.field
        raise PromptError(name, error.value, error.reason, prompt_index=place) from None


def _kept(sequences: Sequence[int | None], limit: int, *, left: bool) -> np.ndarray:
    """Which tokens of an encoding stay, bool: its special tokens, and of the texts what
    transformers' strategy "longest_first" leaves.

    Args:
        sequences: of each token the text that it is of; None for special tokens.
        limit: tokens in all.
    """
    owner = np.array([-1 if one is None else one for one in sequences])
    first, second = (np.flatnonzero(owner == text) for text in (0, 1))
    room = limit - int((owner < 0).sum())
    if room < 1:
        reason = f"leaves no room for a text beside {limit - room} special tokens"
        raise PoolingError("truncate_prompt_tokens", limit, reason)
    keep_first, keep_second = _longest_first(len(first), len(second), room)
    kept = owner < 0
    for tokens, count in ((first, keep_first), (second, keep_second)):
        if count:
            kept[tokens[-count:] if left else tokens[:count]] = True
    return kept


def _longest_first(first: int, second: int, room: int) -> tuple[int, int]:
    """Tokens of each text, as the tokenizers library shares `room` between a pair."""
    if first + second <= room:
        return first, second
    if not second:
        return room, 0
    shorter, longer = sorted((first, second))
    longer = max(shorter, room - shorter)
    if shorter + longer > room:
        shorter = room // 2
        longer = room - shorter
    return (longer, shorter) if first > second else (shorter, longer)


class _SlowEncoding:
    """What `PoolingInputs` reads of an encoding, from a tokenizer in Python."""

    def __init__(self, hf: Any, text: Text, add_special_tokens: bool) -> None:
        pair = text if isinstance(text, tuple) else (text, None)
        parts = [None if one is None else hf.encode(one, add_special_tokens=False) for one in pair]
        self.ids = [*(parts[0] or ()), *(parts[1] or ())]
        self.type_ids = special = [0] * len(self.ids)
        if add_special_tokens:
            self.ids = hf.build_inputs_with_special_tokens(*parts)
            self.type_ids = hf.create_token_type_ids_from_sequences(*parts)
            special = hf.get_special_tokens_mask(*parts)
        texts = iter([0] * len(parts[0] or ()) + [1] * len(parts[1] or ()))
        self.sequence_ids = [None if mask else next(texts) for mask in special]
