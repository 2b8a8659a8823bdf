"""How models mark their reasoning, as data, and where their answer begins.

Names are those of vLLM's --reasoning-parser. How messages are read: `server/regions/`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

OFF = "none"
"""The name of a parser that parses nothing."""


@dataclass(frozen=True, slots=True)
class AnswerStart:
    """Where the answer of a model that may reason begins.

    Attributes:
        begins_after: tokens behind which it begins; empty: at the first output token.
        may_begin_with: a first token with which reasoning begins; without it the answer begins at
            once. None: there is none.
    """

    begins_after: tuple[int, ...] = ()
    may_begin_with: int | None = None


@dataclass(frozen=True, slots=True)
class ReasoningFormat:
    """How a model marks its reasoning.

    Attributes:
        opens: markers before it; the first is the usual one.
        closes: markers after it.
        always: a message begins with reasoning, whether or not the prompt or the model opens it.
    """

    name: str
    opens: tuple[str, ...] = ("<think>",)
    closes: tuple[str, ...] = ("</think>",)
    always: bool = False

    def is_open_behind(self, prompt: str) -> bool:
        """Whether a message begins with reasoning without a marker. Only the end of the prompt
        counts: a marker further up may be a user's text."""
        opened = prompt.rstrip().endswith(self.opens)
        return opened or (self.always and not self.is_closed_behind(prompt))

    def is_closed_behind(self, prompt: str) -> bool:
        """Whether the prompt ends with the end of reasoning, so that none follows."""
        return prompt.rstrip().endswith(self.closes)

    def answer_start(self, prompt: str, token_ids: Mapping[str, int]) -> AnswerStart:
        """Where the answer begins: behind the token that ends reasoning. A model without such a
        token has its constraint hold from the first token on.

        Args:
            prompt: its end is enough.
            token_ids: of the markers that are tokens of the model.
        """
        closes = token_ids.get(self.closes[0])
        if closes is None:
            return AnswerStart()
        if self.is_open_behind(prompt):
            return AnswerStart((closes,))
        opens = token_ids.get(self.opens[0]) if self.opens else None
        if opens is None or self.is_closed_behind(prompt):
            return AnswerStart()
        return AnswerStart((closes,), opens)


REASONING_FORMATS: dict[str, ReasoningFormat] = {
    one.name: one
    for one in (
        ReasoningFormat("qwen3"),
        ReasoningFormat("deepseek_r1", always=True),
        ReasoningFormat("mistral", ("[THINK]",), ("[/THINK]",)),
        ReasoningFormat("minimax_m2", always=True),
        ReasoningFormat(
            "granite",
            ("Here is my thought process:", "Here's my thought process:"),
            ("Here is my response:", "Here's my response:"),
        ),
    )
}
REASONING_ALIASES = {
    "deepseek_v3": "qwen3",
    "glm45": "qwen3",
    "glm47": "qwen3",
    "kimi_k2": "qwen3",
    "mimo": "qwen3",
    "minimax": "qwen3",
    "olmo3": "deepseek_r1",
}
HARMONY_NAMES = ("openai_gptoss", "harmony", "openai")
"""Models that write reasoning and answer in channels."""
HARMONY_ANSWER = "<|channel|>final<|message|>"
"""Harmony's header of an answer."""
REASONING_PARSER_NAMES = tuple(sorted((*REASONING_FORMATS, *REASONING_ALIASES, *HARMONY_NAMES)))


def reasoning_format(name: str) -> ReasoningFormat:
    """The format of a name that is none of `HARMONY_NAMES`."""
    return REASONING_FORMATS[REASONING_ALIASES.get(name, name)]
