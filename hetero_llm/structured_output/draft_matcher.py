"""The state of a sequence under its grammar where drafts are chosen: what of a draft the grammar
takes, and which tokens it forces."""

from __future__ import annotations

from collections.abc import Sequence

from hetero_llm.core.draft_tree import MAX_NODES
from hetero_llm.structured_output.compiler import Matcher, text_before


class DraftMatcher(Matcher):
    """`core.grammar.DraftGrammar`. Forced tokens are llguidance's "fast-forward tokens": where the
    grammar leaves one text only, the tokens that the tokenizer makes of it."""

    def constrained(
        self, token_ids: Sequence[int], parents: Sequence[int], most: int
    ) -> tuple[list[int], list[int], int]:
        """See `DraftGrammar`."""
        if self.error is not None:
            return [], [], 0
        walk = _Walk(self, token_ids, parents)
        walk.descend(
            -1, -1, -1, self._before, self._grammar.may_begin_with if self._may_open else None
        )
        order = sorted(range(len(walk.found)), key=lambda node: walk.found[node][2])[:most]
        place = {node: at for at, node in enumerate(order)}
        place[-1] = -1
        kept = [walk.found[node] for node in order]
        return (
            [token for token, _, _, _ in kept],
            [place[parent] for _, parent, _, _ in kept],
            sum(forced for _, _, _, forced in kept),
        )

    def before(self, before: tuple[int, ...], token_id: int) -> tuple[int, ...] | None:
        """See `text_before`."""
        return text_before(self._grammar, before, token_id)

    def take(self, token_id: int) -> bool:
        """Moves on by a token of a draft; `give_back` undoes it."""
        return not self._matcher.is_stopped() and self._matcher.try_consume_tokens([token_id]) == 1

    def give_back(self, count: int) -> None:
        """Moves back by `count` tokens of a draft."""
        if count:
            self._matcher.rollback(count)

    def forced(self) -> list[int]:
        """The tokens that must come next; empty where there is a choice, or an end."""
        return [] if self._matcher.is_stopped() else self._matcher.compute_ff_tokens()


class _Walk:
    """A walk through a draft, depth first.

    Attributes:
        found: (token, parent in `found` or -1, rank, whether it is forced). A draft's node ranks by
            its index, a forced one as the node that it follows: so the best come first, and
            parents before children.
    """

    def __init__(
        self, matcher: DraftMatcher, token_ids: Sequence[int], parents: Sequence[int]
    ) -> None:
        self._matcher = matcher
        self._token_ids = token_ids
        self._children: dict[int, list[int]] = {}
        for node, parent in enumerate(parents):
            self._children.setdefault(parent, []).append(node)
        self.found: list[tuple[int, int, int, bool]] = []

    def descend(
        self,
        node: int,
        parent: int,
        rank: int,
        before: tuple[int, ...] | None,
        opens: int | None = None,
    ) -> None:
        """Adds what follows a node that the grammar has taken.

        Args:
            node: of the draft; -1 for its root. parent, rank: of the nodes to be added.
            before: the last tokens there if the grammar has not begun.
            opens: the token that may begin a free text there.
        """
        children = self._children.get(node, [])
        taken = 0
        # Behind a choice that the draft has made, its nodes are looked at first.
        if before is None and opens is None and (node == -1 or not children):
            for token in self._matcher.forced():
                if len(self.found) >= MAX_NODES or not self._matcher.take(token):
                    break
                taken += 1
                self.found.append((token, parent, rank, True))
                parent = len(self.found) - 1
                same = [child for child in children if self._token_ids[child] == token]
                children = [below for child in same for below in self._children.get(child, [])]
        for child in children:
            token = self._token_ids[child]
            is_free = before is not None or token == opens
            if not is_free and not self._matcher.take(token):
                continue
            self.found.append((token, parent, child, False))
            below = () if token == opens else before
            if before is not None:
                below = self._matcher.before(before, token)
            self.descend(child, len(self.found) - 1, child, below)
            if not is_free:
                self._matcher.give_back(1)
        self._matcher.give_back(taken)
