"""Block manager and prefix cache against a model of what every block must hold. No torch."""

from __future__ import annotations

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from hetero_llm.engine.block_manager import BlockManager
from hetero_llm.engine.prefix_cache import PrefixCache, block_key, root_key

SIZE = 4
NUM_BLOCKS = 10
ROOTS = {name: root_key(("salt", name)) for name in ("a", "b")}
# Few distinct tokens, so that prefixes often coincide.
TOKENS = st.lists(st.integers(0, 1), min_size=1, max_size=3 * SIZE + 2)

Entry = tuple[str, int]
"""What a position holds: its namespace and token. KV depends on everything before as well, so a
block is compared together with the blocks before it."""


class Traffic(RuleBasedStateMachine):
    """Plays scheduler and runner: `memory` and `tables` are what a device would hold."""

    def __init__(self) -> None:
        super().__init__()
        self.cache = PrefixCache()
        self.manager = BlockManager(NUM_BLOCKS, SIZE, self.cache)
        self.memory: list[list[Entry | None]] = [[None] * SIZE for _ in range(NUM_BLOCKS)]
        self.tables: dict[int, dict[int, int]] = {}  # as told by take_changes
        self.tokens: dict[int, list[int]] = {}
        self.computed: dict[int, int] = {}
        self.roots: dict[int, str] = {}
        self.next_table = 0

    # -- what the scheduler may do ----------------------------------------------------------

    @rule(tokens=TOKENS, root=st.sampled_from(sorted(ROOTS)), reuse=st.booleans())
    def open(self, tokens: list[int], root: str, reuse: bool) -> None:
        table = self._new_table(tokens, root)
        expected = self._cached_tokens(tokens, root) if reuse else 0
        self.computed[table] = self.manager.open(table, tokens, ROOTS[root], reuse)
        assert self.computed[table] == expected
        assert self.computed[table] < len(tokens)
        self._apply_changes()

    @precondition(lambda self: self.tokens)
    @rule(data=st.data(), count=st.integers(1, 9))
    def compute(self, data: st.DataObject, count: int) -> None:
        """Writes the next tokens of a table as a step does: grow, copy, write, commit."""
        table = self._any_table(data)
        tokens, computed = self.tokens[table], self.computed[table]
        if computed == len(tokens):
            tokens.append(data.draw(st.integers(0, 1)))
        end = min(len(tokens), computed + count)
        before = self._state()
        needed = self._blocks_needed(table, end)
        if not self.manager.grow(table, computed, end):
            assert needed > before["free"]
            assert self._state() == before  # a refusal changes nothing
            assert not self._apply_changes()
            return
        assert needed == before["free"] - self.manager.num_free
        self._apply_changes()
        for position in range(computed, end):
            block = self.tables[table][position // SIZE]
            readers = [t for t in self.tokens if block in self.manager.block_ids(t)]
            assert readers == [table], "a shared block was written"
            assert not self.cache.holds(block), "a published block was written"
            self.memory[block][position % SIZE] = (self.roots[table], tokens[position])
        self.computed[table] = end
        self.manager.commit(table, tokens, end)

    @precondition(lambda self: self.tokens)
    @rule(data=st.data())
    def fork(self, data: st.DataObject) -> None:
        source = self._any_table(data)
        table = self._new_table(self.tokens[source], self.roots[source])
        self.computed[table] = self.computed[source]
        before = self.manager.num_free
        self.manager.fork(source, table)
        assert self.manager.num_free == before
        assert self.manager.block_ids(table) == self.manager.block_ids(source)
        self._apply_changes()

    @precondition(lambda self: self.tokens)
    @rule(data=st.data())
    def close(self, data: st.DataObject) -> None:
        table = self._any_table(data)
        self.manager.close(table)
        for state in (self.tables, self.tokens, self.computed, self.roots):
            del state[table]

    @rule()
    def reset_prefix_cache(self) -> None:
        self.manager.reset_prefix_cache()
        assert len(self.cache) == 0

    # -- what must always hold --------------------------------------------------------------

    @invariant()
    def every_block_is_free_or_counted(self) -> None:
        self.manager.check_integrity()
        held = {b for t in self.tokens for b in self.manager.block_ids(t)}
        assert self.manager.num_free == NUM_BLOCKS - len(held)

    @invariant()
    def every_table_reads_its_own_tokens(self) -> None:
        for table, tokens in self.tokens.items():
            blocks = self.manager.block_ids(table)
            assert blocks == tuple(self.tables[table][c] for c in range(len(blocks)))
            computed = self.computed[table]
            assert len(blocks) >= self.manager.blocks_for(computed)
            held = [self.memory[blocks[p // SIZE]][p % SIZE] for p in range(computed)]
            assert held == [(self.roots[table], t) for t in tokens[:computed]]

    @invariant()
    def published_blocks_hold_the_tokens_of_their_key(self) -> None:
        for key, block in self.cache._block_of.items():
            content = self.memory[block]
            assert None not in content
            roots = {entry[0] for entry in content if entry is not None}
            assert len(roots) == 1
            assert self._keys_of_contents()[block] == key
        assert len(self.cache._block_of) == len(self.cache._key_of)

    # -- helpers ----------------------------------------------------------------------------

    def _new_table(self, tokens: list[int], root: str) -> int:
        table = self.next_table
        self.next_table += 1
        self.tokens[table], self.roots[table] = list(tokens), root
        self.tables[table] = {}
        return table

    def _any_table(self, data: st.DataObject) -> int:
        return data.draw(st.sampled_from(sorted(self.tokens)))

    def _apply_changes(self) -> bool:
        """Does what a runner does; True if there was anything to do."""
        changes = self.manager.take_changes()
        for table, column, block in zip(changes.tables, changes.columns, changes.blocks):
            self.tables[table][column] = block
        for source, destination in zip(changes.copy_from, changes.copy_to):
            self.memory[destination] = list(self.memory[source])
            self.prefix_of[destination] = self.prefix_of.get(source)
        return bool(changes.blocks or changes.copy_to)

    def _state(self) -> dict[str, object]:
        tables = {t: self.manager.block_ids(t) for t in self.tokens}
        return {"free": self.manager.num_free, "tables": tables, "cache": dict(self.cache._key_of)}
