"""What the engine's configuration adds to the constraints of requests."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from hetero_llm.config.engine_config import ConstraintsConfig
from hetero_llm.core.reasoning_formats import (
    HARMONY_ANSWER,
    HARMONY_NAMES,
    OFF,
    AnswerStart,
    reasoning_format,
)
from hetero_llm.core.structured_outputs import StructuredOutputsParams, ToolOutputParams
from hetero_llm.engine.text.tokenizer import Tokenizer

logger = logging.getLogger(__name__)

_PROMPT_END = 32
"""Tokens of a prompt that are looked at: a marker, and white space behind it."""


class ConstraintDefaults:
    """Completes the constraints of requests.

    Args:
        tokenizer: None: no request has a constraint.
    """

    def __init__(self, tokenizer: Tokenizer | None, config: ConstraintsConfig) -> None:
        self._config = config
        self._tokenizer = tokenizer
        name = config.reasoning_parser
        if name == OFF or config.enable_in_reasoning or tokenizer is None:
            name = None
        self._harmony = name in HARMONY_NAMES
        self._format = None if name is None or self._harmony else reasoning_format(name)
        self._warned = False

    def applied(
        self, constraint: StructuredOutputsParams, prompt_ids: Sequence[int]
    ) -> StructuredOutputsParams:
        """The constraint of a request with this prompt. What the request says stays."""
        changes = self._options(constraint)
        if isinstance(constraint, ToolOutputParams) and constraint.answer is not None:
            options = self._options(constraint.answer)
            changes["answer"] = replace(constraint.answer, **options)
        if constraint.begins_after is None:
            start = self._answer_start(prompt_ids)
            changes["begins_after"] = start.begins_after
            changes["may_begin_with"] = start.may_begin_with
        return replace(constraint, **changes) if changes else constraint

    def _options(self, constraint: StructuredOutputsParams) -> dict[str, Any]:
        changes: dict[str, Any] = {}
        if self._config.disable_any_whitespace and constraint.whitespace_pattern is None:
            changes["disable_any_whitespace"] = True
        if self._config.disable_additional_properties:
            changes["disable_additional_properties"] = True
        return changes

    def _answer_start(self, prompt_ids: Sequence[int]) -> AnswerStart:
        tokenizer = self._tokenizer
        if tokenizer is None or not (self._format or self._harmony):
            return AnswerStart()
        if self._format is None:
            ids = tokenizer.encode(HARMONY_ANSWER, add_special_tokens=False)
            return AnswerStart(tuple(ids))
        markers = {text: index for index, text in tokenizer.added_tokens.items()}
        if self._format.closes[0] not in markers and not self._warned:
            self._warned = True
            logger.warning(
                "reasoning_parser=%r: this tokenizer has no token %r, so constraints of outputs "
                "begin at once, before any reasoning",
                self._config.reasoning_parser,
                self._format.closes[0],
            )
        end = tokenizer.decode(prompt_ids[-_PROMPT_END:], skip_special_tokens=False)
        return self._format.answer_start(end, markers)
