"""The grammar of a request's output, as plain data, and what the runner asks of its state."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
from numpy.typing import NDArray


@dataclass(frozen=True, slots=True)
class Grammar:
    """A grammar that has been checked.

    Attributes:
        text: in llguidance's form.
        begins_after: tokens behind which it begins; empty: at the first output token.
        may_begin_with: a first token that may come instead of the grammar, which then begins behind
            `begins_after`; None: there is none.
    """

    text: str
    begins_after: tuple[int, ...] = ()
    may_begin_with: int | None = None


class GrammarMatcher(Protocol):
    """The state of one sequence under its grammar."""

    @property
    def error(self) -> str | None:
        """Why the grammar can no longer be followed (a limit of its parser); None: it can."""

    def observe(self, token_id: int) -> None:
        """Takes in the next output token. One that the grammar refuses is an error."""

    def try_observe(self, token_id: int) -> bool:
        """Takes in the next token of a draft. False: the grammar refuses it; nothing changes."""

    def copy(self) -> GrammarMatcher:
        """A state of its own that has taken in the same tokens."""

    def fill_mask(self, mask: NDArray[np.int32]) -> bool:
        """Writes which tokens may come next: bit i of word w stands for token 32 w + i.

        Args:
            mask: [ceil(vocabulary / 32)] int32, written unless all tokens may come.

        Returns:
            False: all tokens may come, since the grammar has not begun.
        """


OpenMatcher = Callable[[Grammar, Sequence[int]], GrammarMatcher]
"""The state of a sequence with these output tokens under a grammar."""


class DraftGrammar(Protocol):
    """The state of one sequence where its drafts are chosen."""

    def observe(self, token_id: int) -> None:
        """Takes in the next output token."""

    def constrained(
        self, token_ids: Sequence[int], parents: Sequence[int], most: int
    ) -> tuple[list[int], list[int], int]:
        """A draft without the nodes that the grammar refuses, and with the tokens that it forces.

        Args:
            token_ids, parents: of the draft's nodes, see `DraftTree`; may be empty.
            most: nodes of the result.

        Returns:
            Token ids and parents of the nodes, and how many of them are forced: only they can
            follow what is before them.
        """


OpenDraftGrammar = Callable[[Grammar, Sequence[int]], DraftGrammar]
"""The state of a sequence with these output tokens under a grammar."""
