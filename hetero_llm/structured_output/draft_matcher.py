"""The state of a sequence under its grammar where drafts are chosen: what of a draft the grammar
takes, and which tokens it forces."""

from __future__ import annotations

from collections.abc import Sequence

from hetero_llm.core.draft_tree import MAX_NODES
from hetero_llm.structured_output.compiler import Matcher


class DraftMatcher(Matcher):
    """`core.grammar.DraftGrammar`. Forced tokens are llguidance's "fast-forward tokens": where the
    grammar leaves one text only, the tokens that the tokenizer makes of it."""

    def constrained(
        self, token_ids: Sequence[int], parents: Sequence[int], most: int
    ) -> tuple[list[int], list[int], int]:
        """See `DraftGrammar`."""
        if self._error is not None:
            return [], [], 0
        walk = _Walk(self, token_ids, parents)
        walk.descend(-1, -1, -1, self._begun, self._recent)
        order = sorted(range(len(walk.found)), key=lambda node: walk.found[node][2])[:most]
        place = {node: at for at, node in enumerate(order)}
        place[-1] = -1
        kept = [walk.found[node] for node in order]
        return (
            [token for token, _, _, _ in kept],
            [place[parent] for _, parent, _, _ in kept],
            sum(forced for _, _, _, forced in kept),
        )

    def next_recent(self, recent: tuple[int, ...], token_id: int) -> tuple[int, ...]:
        """The last tokens before the grammar's beginning, `token_id` included."""
        return (*recent, token_id)[-len(self._begins_after) :]

    def begins_with(self, recent: tuple[int, ...]) -> bool:
        """Whether the grammar begins behind these last tokens."""
        return recent == self._begins_after

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
        self, node: int, parent: int, rank: int, begun: bool, recent: tuple[int, ...]
    ) -> None:
        """Adds what follows a node that the grammar has taken.

        Args:
            node: of the draft; -1 for its root. parent, rank: of the nodes to be added.
            begun, recent: whether the grammar has begun there, and the tokens before, if not.
        """
        children = self._children.get(node, [])
        taken = 0
        # Behind a choice that the draft has made, its nodes are looked at first.
        if begun and (node == -1 or not children):
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
            before = recent if begun else self._matcher.next_recent(recent, token)
            if begun and not self._matcher.take(token):
                continue
            self.found.append((token, parent, child, False))
            begins = begun or self._matcher.begins_with(before)
            self.descend(child, len(self.found) - 1, child, begins, before)
            if begun:
                self._matcher.give_back(1)
        self._matcher.give_back(taken)
