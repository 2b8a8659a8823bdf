"""`PoolingParams`: what a user wants from a pooling model. Names and meanings are vLLM's."""

from __future__ import annotations

import copy
from dataclasses import InitVar, dataclass
from typing import Any

from hetero_llm.core.errors import PoolingError

EMBED, CLASSIFY, SCORE = "embed", "classify", "score"
_TASKS = (EMBED, CLASSIFY, SCORE)
_LATER = ("token_embed", "token_classify", "plugin", "encode", "reward")
_SIDES = ("left", "right")


@dataclass(slots=True)
class PoolingParams:
    """Parameters of one input of a pooling model.

    Attributes:
        truncate_prompt_tokens: most tokens of an input, special tokens included; more are cut off.
            -1 is the model's limit; None: a longer input is an error.
        dimensions: leading entries of an embedding to keep (Matryoshka); None: all.
        normalize: scale an embedding to length 1; None: as the model's files say.
        use_activation: apply the classifier's sigmoid or softmax; None: yes.
        task: "embed", "classify" or "score"; None: the call's.
        truncation_side: "left" or "right", the side that is cut; None: the tokenizer's.
        prompt_name: a prompt of config_sentence_transformers.json to put before each text; None:
            the file's default, "" none. Not in vLLM.
        activation, softmax: older names of `use_activation`.
        step_tag_id, returned_token_ids: of reward models, not available yet.
        requires_token_ids, extra_kwargs, late_interaction_params: vLLM's; not available yet, but
            None, False and {} are accepted.
        skip_reading_prefix_cache: without effect: a model that pools has no prefix cache.

    Raises:
        PoolingError: a field has a wrong type or value.
    """

    truncate_prompt_tokens: int | None = None
    dimensions: int | None = None
    normalize: bool | None = None
    use_activation: bool | None = None
    task: str | None = None
    truncation_side: str | None = None
    prompt_name: str | None = None
    activation: bool | None = None
    softmax: bool | None = None
    step_tag_id: int | None = None
    returned_token_ids: list[int] | None = None
    requires_token_ids: InitVar[bool] = False
    extra_kwargs: InitVar[Any] = None
    late_interaction_params: InitVar[Any] = None
    skip_reading_prefix_cache: InitVar[bool | None] = None

    def __post_init__(
        self,
        requires_token_ids: bool,
        extra_kwargs: Any,
        late_interaction_params: Any,
        skip_reading_prefix_cache: bool | None,
    ) -> None:
        for name, value, feature in (
            ("requires_token_ids", requires_token_ids, "a pooler that sees the token ids"),
            ("extra_kwargs", extra_kwargs, "an argument for a pooler of one's own"),
            ("late_interaction_params", late_interaction_params, "late interaction"),
        ):
            if value is not None and value is not False and value != {}:
                raise PoolingError(name, value, f"{feature} is not available yet")
        for name in ("step_tag_id", "returned_token_ids"):
            if getattr(self, name) is not None:
                raise _bad(self, name, "a reward model is not available yet")
        for name in ("activation", "softmax"):
            value = getattr(self, name)
            if value is not None and self.use_activation not in (None, value):
                raise _bad(self, name, "is another name of use_activation, also given")
            self.use_activation = value if value is not None else self.use_activation
            setattr(self, name, None)
        self.check()

    def check(self) -> None:
        """Checks all fields; their owner may have assigned to them.

        Raises:
            PoolingError: a field has a wrong type or value.
        """
        for name in ("normalize", "use_activation"):
            if not isinstance(getattr(self, name), bool | None):
                raise _bad(self, name, "must be True, False or None")
        for name, lowest in (("truncate_prompt_tokens", -1), ("dimensions", 1)):
            value = getattr(self, name)
            if value is not None and (type(value) is not int or value < lowest or value == 0):
                extra = ", or -1 for the model's limit" if lowest < 0 else ""
                raise _bad(self, name, f"must be an integer of at least 1{extra}")
        if self.task is not None and self.task not in _TASKS:
            later = "is not available yet; use" if self.task in _LATER else "must be"
            raise _bad(self, "task", f"{later} 'embed', 'classify' or 'score'")
        if self.truncation_side not in (None, *_SIDES):
            raise _bad(self, "truncation_side", "must be 'left' or 'right'")
        if not isinstance(self.prompt_name, str | None):
            raise _bad(self, "prompt_name", "must be a string")

    def clone(self) -> PoolingParams:
        return copy.copy(self)


def _bad(params: PoolingParams, name: str, reason: str) -> PoolingError:
    value: Any = getattr(params, name)
    return PoolingError(name, value, reason)
