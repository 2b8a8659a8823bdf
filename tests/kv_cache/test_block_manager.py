"""Block manager and prefix cache against a model of what every block must hold. No torch."""

from __future__ import annotations

from hashlib import sha256

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from hetero_llm.kv_cache.block_manager import BlockManager
from hetero_llm.kv_cache.prefix_cache import PrefixCache, hash_block, hash_root, token_bytes

SIZE = 4
NUM_BLOCKS = 7
ROOTS = {name: hash_root(("salt", name)) for name in ("a", "b")}
# Few distinct prompts, so that prefixes often coincide, and whole blocks more often than not.
PROMPTS = st.builds(
    lambda token, blocks, rest: [token] * (blocks * SIZE) + [1] * rest,
    st.integers(0, 1),
    st.integers(1, 3),
    st.sampled_from([0, 0, 1, SIZE - 1]),
)

Entry = tuple[str, tuple[int, ...]]
"""KV of one position: it depends on the namespace and on all tokens up to and with its own."""


def hashes_of(root: str, tokens: tuple[int, ...] | list[int]) -> list[bytes]:
    """Hash of each full block."""
    hashes: list[bytes] = []
    for end in range(SIZE, len(tokens) + 1, SIZE):
        parent_hash = hashes[-1] if hashes else ROOTS[root]
        hashes.append(hash_block(parent_hash, tokens[end - SIZE : end]))
    return hashes


class Traffic(RuleBasedStateMachine):
    """Plays scheduler and runner; `memory` and `columns` are what the device would have."""

    def __init__(self) -> None:
        super().__init__()
        self.cache = PrefixCache()
        self.manager = BlockManager(NUM_BLOCKS, SIZE, self.cache)
        self.memory: list[list[Entry | None]] = [[None] * SIZE for _ in range(NUM_BLOCKS)]
        self.columns: dict[int, dict[int, int]] = {}  # of each table, by `take_changes`
        self.tokens: dict[int, list[int]] = {}
        self.computed: dict[int, int] = {}
        self.roots: dict[int, str] = {}
        self.stale: set[int] = set()  # tables older than the last reset
        self.num_opened = 0

    # -- what the scheduler does ------------------------------------------------------------

    @rule(
        tokens=PROMPTS,
        root=st.sampled_from(["a", "a", "b"]),
        reuse=st.sampled_from([True, True, False]),
        packed=st.sampled_from([0, 5, 99]),
    )
    def open(self, tokens: list[int], root: str, reuse: bool, packed: int) -> None:
        expected = 0
        for block_hash in hashes_of(root, tokens) if reuse else ():
            if block_hash not in self._cached_hashes():
                break
            expected += SIZE
        expected = min(expected, len(tokens) - 1)
        table = self._new_table(tokens, root)
        self.computed[table] = self.manager.match_prefix(
            table, tokens, ROOTS[root], reuse, token_bytes(tokens[:packed])
        )
        assert self.computed[table] == expected
        self._apply_changes()

    @precondition(lambda self: self.tokens)
    @rule(
        data=st.data(),
        count=st.sampled_from([1, 3, SIZE, 99]),
        drafts=st.sampled_from([0, 0, 0, 1, SIZE, 2 * SIZE]),
    )
    def compute(self, data: st.DataObject, count: int, drafts: int) -> None:
        """One chunk of one table: grow, apply the changes, write, commit. Behind it lie rows of
        draft nodes, all rejected."""
        table = self._any_table(data)
        tokens, start = self.tokens[table], self.computed[table]
        if start == len(tokens):
            tokens.append(data.draw(st.integers(0, 1)))
        end = min(len(tokens), start + count)
        before = self._state()
        needed, freed = self._blocks_needed(table, start, end + drafts)
        if not self.manager.allocate(table, start, end + drafts):
            assert needed > self.manager.num_free, "refused although there was room"
            assert self._state() == before
            assert not self._apply_changes()
            return
        assert self.manager.num_free == before[0] - needed + freed
        self._apply_changes()
        for position in range(start, end + drafts):
            block = self.columns[table][position // SIZE]
            assert self._readers(block) == [table], "a shared block was written"
            assert self.cache.uncached([block]), "a cached block was written"
            known = position < end
            entry = (self.roots[table], tuple(tokens[: position + 1])) if known else None
            self.memory[block][position % SIZE] = entry
        self.computed[table] = end
        cached = self._state()[2]
        self.manager.cache_blocks(table, tokens, end)
        if table in self.stale:
            assert self._state()[2] == cached, "cached although its parent is gone"
            return
        for block_hash in hashes_of(self.roots[table], tokens[:end])[start // SIZE :]:
            assert block_hash in self._cached_hashes(), "a full block was not cached"

    @precondition(lambda self: self.tokens)
    @rule(data=st.data())
    def fork(self, data: st.DataObject) -> None:
        source = self._any_table(data)
        table = self._new_table(self.tokens[source], self.roots[source])
        self.computed[table] = self.computed[source]
        self.stale |= {table} if source in self.stale else set()
        before = self.manager.num_free
        self.manager.fork(source, table)
        assert self.manager.num_free == before
        self._apply_changes()

    @precondition(lambda self: self.tokens)
    @rule(data=st.data())
    def close(self, data: st.DataObject) -> None:
        table = self._any_table(data)
        self.manager.free(table)
        for state in (self.columns, self.tokens, self.computed, self.roots):
            del state[table]

    @rule()
    def reset_prefix_cache(self) -> None:
        self.manager.reset_prefix_cache()
        assert len(self.cache) == 0
        self.stale |= self.tokens.keys()

    # -- what must always hold --------------------------------------------------------------

    @invariant()
    def every_block_is_free_or_counted(self) -> None:
        self.manager.check_integrity()
        held = {block for table in self.tokens for block in self.manager.block_ids(table)}
        assert self.manager.num_free == NUM_BLOCKS - len(held)

    @invariant()
    def every_table_reads_its_own_tokens(self) -> None:
        for table, tokens in self.tokens.items():
            blocks = self.manager.block_ids(table)
            assert blocks == tuple(self.columns[table][c] for c in range(len(blocks)))
            for position in range(self.computed[table]):
                entry = self.memory[blocks[position // SIZE]][position % SIZE]
                assert entry == (self.roots[table], tuple(tokens[: position + 1]))

    @invariant()
    def cached_blocks_hold_the_tokens_of_their_hash(self) -> None:
        for block in range(NUM_BLOCKS):
            if not self.cache.is_cached(block):
                continue
            _, block_hash = self.cache.entry(block)
            last = self.memory[block][-1]
            assert last is not None
            root, tokens = last
            assert hashes_of(root, tokens)[-1] == block_hash
            first = len(tokens) - SIZE + 1
            expected = [(root, tokens[:end]) for end in range(first, len(tokens) + 1)]
            assert self.memory[block] == expected

    @invariant()
    def cached_blocks_follow_cached_blocks(self) -> None:
        """However many tables compute one prefix, and in whatever order they end."""
        parents = {lookup_key[:32] for lookup_key, _ in self._entries().values()}
        assert parents <= {*ROOTS.values(), *self._cached_hashes()}
        self.cache.check_integrity()

    @invariant()
    def cached_blocks_are_found_by_what_their_hash_covers(self) -> None:
        assert len(self._cached_hashes()) == len(self.cache) == len(self._entries())
        for lookup_key, block_hash in self._entries().values():
            assert self.cache.has_key(lookup_key)
            assert sha256(lookup_key).digest() == block_hash

    # -- helpers ----------------------------------------------------------------------------

    def _entries(self) -> dict[int, tuple[bytes, bytes]]:
        """Lookup key and hash of each cached block."""
        cached = filter(self.cache.is_cached, range(NUM_BLOCKS))
        return {block: self.cache.entry(block) for block in cached}

    def _cached_hashes(self) -> set[bytes]:
        return {block_hash for _, block_hash in self._entries().values()}

    def _new_table(self, tokens: list[int], root: str) -> int:
        table = self.num_opened
        self.num_opened += 1
        self.tokens[table], self.roots[table], self.columns[table] = list(tokens), root, {}
        return table

    def _any_table(self, data: st.DataObject) -> int:
        return data.draw(st.sampled_from(sorted(self.tokens)))

    def _readers(self, block: int) -> list[int]:
        return [table for table in self.tokens if block in self.manager.block_ids(table)]

    def _blocks_needed(self, table: int, start: int, end: int) -> tuple[int, int]:
        """New ones, and copies of those that others read or may find; how many of the originals
        have no reader then."""
        blocks = self.manager.block_ids(table)
        new = max(0, -(-end // SIZE) - len(blocks))
        written = blocks[start // SIZE : -(-end // SIZE)]
        shared = [len(self._readers(block)) > 1 for block in written]
        found = [not self.cache.uncached([block]) for block in written]
        copied = sum(s or f for s, f in zip(shared, found))
        return new + copied, sum(f and not s for s, f in zip(shared, found))

    def _apply_changes(self) -> bool:
        """Does what the runner does; True if there was anything to do."""
        changes = self.manager.take_changes()
        for table, column, block in changes.writes().T.tolist():
            self.columns[table][column] = block
        for source, destination in zip(changes.copy_from, changes.copy_to):
            self.memory[destination] = list(self.memory[source])
        return bool(changes.runs or changes.copy_to)

    def _state(
        self,
    ) -> tuple[int, dict[int, tuple[int, ...]], dict[int, tuple[bytes, bytes]]]:
        tables = {table: self.manager.block_ids(table) for table in self.tokens}
        return self.manager.num_free, tables, self._entries()


TestTraffic = Traffic.TestCase
TestTraffic.settings = settings(
    max_examples=150, stateful_step_count=50, deadline=None, derandomize=True
)


def opened(manager: BlockManager, table: int, tokens: list[int]) -> int:
    """Opens, computes and caches a table as one step would; returns the tokens found."""
    found = manager.match_prefix(table, tokens, ROOTS["a"])
    assert manager.allocate(table, found, len(tokens))
    manager.cache_blocks(table, tokens, len(tokens))
    return found


def test_without_a_prefix_cache_nothing_is_shared() -> None:
    manager = BlockManager(NUM_BLOCKS, SIZE)
    assert opened(manager, 0, [1] * 9) == 0
    assert opened(manager, 1, [1] * 9) == 0
    assert not set(manager.block_ids(0)) & set(manager.block_ids(1))


def test_blocks_without_a_prefix_go_before_cached_ones() -> None:
    manager = BlockManager(4, SIZE, PrefixCache())
    opened(manager, 0, [1] * 8)
    opened(manager, 1, [2] * 3)
    manager.free(0)
    manager.free(1)
    opened(manager, 2, [3] * 8)
    assert manager.match_prefix(3, [1] * 9, ROOTS["a"]) == 8


def test_a_cached_prefix_loses_its_tail_first_and_the_oldest_goes_first() -> None:
    manager = BlockManager(4, SIZE, PrefixCache())
    for table, token in enumerate((1, 2)):
        opened(manager, table, [token] * 8)
        manager.free(table)
    opened(manager, 2, [3] * 4)  # takes one block: the tail of the oldest prefix
    manager.free(2)
    assert manager.match_prefix(3, [1] * 9, ROOTS["a"]) == 4
    assert manager.match_prefix(4, [2] * 9, ROOTS["a"]) == 8


def test_a_prefix_that_was_hit_is_young_again() -> None:
    manager = BlockManager(4, SIZE, PrefixCache())
    for table, token in enumerate((1, 2)):
        opened(manager, table, [token] * 8)
        manager.free(table)
    assert manager.match_prefix(2, [1] * 9, ROOTS["a"]) == 8
    manager.free(2)
    opened(manager, 3, [3] * 8)
    assert manager.match_prefix(4, [1] * 9, ROOTS["a"]) == 8
    assert manager.match_prefix(5, [2] * 9, ROOTS["a"]) == 0


def duplicates(manager: BlockManager, first: int, second: int, tokens: list[int]) -> None:
    """Two tables that compute the same tokens at the same time: the first one is found."""
    for table in (first, second):
        assert manager.match_prefix(table, tokens, ROOTS["a"]) == 0
        assert manager.allocate(table, 0, len(tokens))
    for table in (first, second):
        manager.cache_blocks(table, tokens, len(tokens))


def test_a_duplicate_becomes_canonical_when_the_other_table_ends() -> None:
    manager = BlockManager(4, SIZE, PrefixCache())
    duplicates(manager, 0, 1, [1] * 8)
    manager.free(0)
    manager.release_closed()
    assert manager.match_prefix(2, [1] * 9, ROOTS["a"]) == 8
    assert manager.block_ids(2) == manager.block_ids(1)
    assert manager.num_free == 2, "what is twice is kept once"


def test_a_free_block_is_as_young_as_its_last_duplicate() -> None:
    """Else it would be evicted before the children of the duplicate, which would be unreachable."""
    manager = BlockManager(6, SIZE, PrefixCache())
    manager.match_prefix(0, [1] * 4, ROOTS["a"])
    manager.match_prefix(1, [1] * 8, ROOTS["a"])
    for table, count in ((0, 4), (1, 8)):
        assert manager.allocate(table, 0, count)
    manager.cache_blocks(0, [1] * 4, 4)
    manager.free(0)  # free before its duplicate is known
    opened(manager, 2, [2] * 4)
    manager.free(2)
    manager.cache_blocks(1, [1] * 8, 8)
    manager.free(1)  # the duplicate: of no use any more
    opened(manager, 3, [3] * 16)  # the unused ones, the duplicate, and the oldest
    assert manager.match_prefix(4, [2] * 5, ROOTS["a"]) == 0
    assert manager.match_prefix(5, [1] * 9, ROOTS["a"]) == 8


def test_namespaces_do_not_share() -> None:
    manager = BlockManager(NUM_BLOCKS, SIZE, PrefixCache())
    opened(manager, 0, [1] * 9)
    assert manager.match_prefix(1, [1] * 9, ROOTS["b"]) == 0
    assert manager.match_prefix(2, [1] * 9, ROOTS["a"]) == 8


def test_a_fork_shares_no_block_that_was_grown_for_drafts_and_is_written_later() -> None:
    manager = BlockManager(NUM_BLOCKS, SIZE)
    manager.match_prefix(0, [1] * 5, ROOTS["a"])
    assert manager.allocate(0, 0, 5 + SIZE)  # the last block is for drafts, which were rejected
    manager.fork(0, 1)
    for start in (5, 2 * SIZE):  # both go on in the second block, then in the third
        for table in (0, 1):
            assert manager.allocate(table, start, start + 1)
        first, second = (manager.block_ids(table) for table in (0, 1))
        assert first[start // SIZE] != second[start // SIZE]
    assert first[0] == second[0]
    manager.check_integrity()


def test_changes_tell_each_entry_of_a_long_prompt_once() -> None:
    """Hits first, then new blocks, then the copy that a fork needs before it writes."""
    manager = BlockManager(12, SIZE, PrefixCache())
    opened(manager, 0, [1] * 14)
    manager.take_changes()
    assert opened(manager, 1, [1] * 18) == 12
    changes = manager.take_changes()
    own = [[1, column, block] for column, block in enumerate(manager.block_ids(1))]
    assert changes.writes().T.tolist() == own and len(own) == 5
    assert manager.block_ids(1)[:3] == manager.block_ids(0)[:3]
    manager.fork(1, 2)
    assert manager.allocate(2, 18, 19)
    changes = manager.take_changes()
    assert changes.writes()[:2].tolist() == [[2] * 6, [0, 1, 2, 3, 4, 4]]
    assert changes.copy_from == [manager.block_ids(1)[4]]
    assert changes.copy_to == changes.writes()[2, 5:].tolist() == [manager.block_ids(2)[4]]
