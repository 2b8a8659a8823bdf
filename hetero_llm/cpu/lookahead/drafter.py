"""Drafts out of what was said before: the lookahead cache as the scheduler sees it.

Every step it copies what sequences have got, looks up what may follow, and hands the drafts over.
While the device works it learns: new tokens go into the sequences' own indexes, outputs in chunks
into the history. TACO-LLM's lookahead cache in behaviour and configuration; the structures are in
raw.py and trie.py.
"""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from time import perf_counter

import numpy as np
from numpy.typing import NDArray

from hetero_llm.core.draft import MAX_NODES, DraftBatch
from hetero_llm.core.lookahead_config import LookaheadConfig
from hetero_llm.core.request import Request, Sequence
from hetero_llm.cpu.lookahead.budget import StepCosts
from hetero_llm.cpu.lookahead.calibration import judge
from hetero_llm.cpu.lookahead.history import History
from hetero_llm.cpu.lookahead.raw import SIGNATURE_TOKENS
from hetero_llm.cpu.lookahead.sources import Proposals, RawSource, Rows, TurboSource
from hetero_llm.cpu.lookahead.texts import SEPARATOR, Text, Texts
from hetero_llm.cpu.topology import read_topology

RAW, TURBO = 0, 1
"""Values of `LookaheadConfig.cache_mode`; 2 is both."""

_PART = 16  # sequences for which a further thread pays
_FEW = 16  # tokens that are looked through faster one by one
_CHUNK = 64  # tokens of an output that go into the history together
_HEADER = 3  # last tokens of a prompt that tell which kind of text follows
_HIT_MEMORY = 0.8  # of the moving averages of hits, kept at each step
_FLOOR, _CEILING = 0.1, 2.0  # of what hits make of the estimated survival
_PATIENCE, _REST = 4, 28  # steps without a draft that pays before and while nobody is asked


@dataclass(slots=True, eq=False)
class Known:
    """What the drafter remembers of a live sequence.

    Attributes:
        hits, expected: moving averages of accepted nodes per draft, and of their estimate.
        proposed, kept: estimate for what was proposed last, and its nodes; 0 for nothing.
        asked: number of the proposal that it was in last, `row` its place in it and `asked_end`
            the end of its text then.
        foreign: it has a token beyond the configured vocabulary, so it is left alone.
    """

    text: Text
    num_prompt: int
    hits: float = 1.0
    expected: float = 1.0
    proposed: float = 0.0
    kept: int = 0
    asked: int = -1
    row: int = 0
    asked_end: int = 0
    foreign: bool = False


class LookaheadDrafter:
    """See `engine.drafting.Drafter`. One thread at a time.

    Args:
        config: with eos_token_id, voc_size and max_seq_len filled in.
        width: tokens of the longest sequence.
        capacity: tokens of the history; 0 for none.

    Attributes:
        num_foreign: sequences left alone for a token beyond voc_size.
    """

    def __init__(self, config: LookaheadConfig, *, width: int, capacity: int) -> None:
        assert config.max_seq_len is not None and config.eos_token_id is not None
        self._config = config
        self._longest = config.max_seq_len
        self._ends = frozenset(config.eos_token_id)
        self._end_array = np.array(config.eos_token_id, np.int32)
        self._texts = Texts(width)
        self._known: dict[str, dict[int, Known]] = {}
        self._fresh: set[Known] = set()
        self._closed: list[Known] = []
        uses_raw, uses_trie = config.cache_mode != TURBO, config.cache_mode != RAW
        self._history = History(config, capacity, uses_raw=uses_raw, uses_trie=uses_trie)
        first = TurboSource.NUM_KINDS
        self._record = np.zeros((first + RawSource.NUM_KINDS, 2), np.float32)
        self._turbo = TurboSource(config, self._record[:first]) if uses_trie else None
        self._raw = RawSource(config, self._record[first:], first) if uses_raw else None
        self._sources = [s for s in (self._turbo, self._raw) if s is not None]
        # A chunk repeats of the one before what any of its contexts reaches back to.
        self._overlap = max(
            config.turbo_match_length + config.copy_length - 1,
            config.match_length + SIGNATURE_TOKENS - 1,
        )
        self._found = self._before = Proposals.empty(1)
        self._asked = 0
        self._tick = 0
        self._costs = StepCosts()
        self._turn = 0.0  # seconds of a proposal, lately
        self._in_vain = 0  # proposals since the last one that paid
        self._resting = 0  # steps until the next one
        self._mean_hits = self._mean_expected = 1.0
        self._threads = min(config.num_threads, read_topology().usable_cores)
        self._pool = ThreadPoolExecutor(max(self._threads - 1, 1), "hetero-lookahead")
        self.num_foreign = 0
        self._compile()

    def _compile(self) -> None:
        """Goes once through everything that is compiled at its first use."""
        text = self._texts.open(0)
        self._texts.extend(text, [0, 1, 0])
        new = Rows.of([text])
        text.indexed = text.end
        rows = Rows.of([text])
        for source in self._sources:
            source.learn(self._texts.tokens, new, 0)
            limits = np.zeros(1, np.int32)
            source.propose(self._texts.tokens, rows, self._history.shared(), limits, self._found)
            source.forget(self._texts.tokens, rows)
        self._learn_from([])
        self._keep_what_pays([], self._found.some(slice(0)), 0)
        self._texts.close(text)

    @property
    def idle(self) -> bool:
        return self._resting > 0

    @property
    def num_bytes(self) -> int:
        """Memory of texts, indexes and history."""
        local = sum(source.num_bytes for source in self._sources)
        return self._texts.num_bytes + local + self._history.num_bytes

    def propose(self, sequences: list[Sequence], limits: list[int], num_rows: int) -> DraftBatch:
        begin = perf_counter()
        known = [self._follow(sequence) for sequence in sequences]
        self._learn_from(known)
        most = self._limits(sequences, known, limits)
        # What is found now is judged by the next call, when its tokens have come.
        self._found, self._before = self._before, self._found
        if len(self._found.counts) < len(known):
            self._found = Proposals.empty(2 * len(known))
        found = self._found.rows(len(known))
        self._look_up(Rows.of([one.text for one in known]), most, found)
        kept = self._keep_what_pays(known, found, num_rows)
        self._keep_to_target(known, kept.counts)
        self._asked += 1
        held = np.arange(kept.survival.shape[1]) < kept.counts[:, None]
        expected = np.where(held, kept.survival, 0.0).sum(axis=1).tolist()
        for row, (one, count) in enumerate(zip(known, kept.counts.tolist(), strict=True)):
            one.proposed, one.kept = expected[row], count
            one.asked, one.row, one.asked_end = self._asked, row, one.text.end
        batch = kept.batch()
        seconds = perf_counter() - begin
        self._turn += 0.1 * (min(seconds, 2 * self._turn + 1e-4) - self._turn)
        return batch

    def observe(self, num_rows: int, seconds: float) -> None:
        self._costs.observe(num_rows, seconds)

    def close(self, request: Request) -> None:
        for index, known in self._known.pop(request.request_id, {}).items():
            if not known.foreign:
                self._copy(known, request.sequences[index].token_ids)
            self._fresh.discard(known)
            self._closed.append(known)

    def settle(self) -> None:
        self._resting = max(self._resting - 1, 0)
        if not (self._fresh or self._closed):
            return
        self._tick += 1
        tokens = self._texts.tokens
        # With ignore_prompt the first tokens of an output are not to be learned.
        fresh = [k.text for k in self._fresh if k.text.end > k.text.indexed]
        if fresh:
            rows = Rows.of(fresh)
            for source in self._sources:
                source.learn(tokens, rows, self._tick)
            for text in fresh:
                text.indexed = text.end
        for known in self._fresh:
            if known.text.end - known.text.told >= _CHUNK:
                self._tell(known)
        self._fresh.clear()
        if self._closed:
            self._forget()

    def _forget(self) -> None:
        """Ended sequences go into the history and out of everything else."""
        for known in self._closed:
            if not known.foreign:
                self._tell(known)
        texts = [known.text for known in self._closed]
        for text in texts:
            text.indexed = min(text.indexed, text.end)
        for source in self._sources:
            source.forget(self._texts.tokens, Rows.of(texts))
        for text in texts:
            self._texts.close(text)
        self._closed.clear()

    # -- following sequences ----------------------------------------------------------------

    def _follow(self, sequence: Sequence) -> Known:
        of_request = self._known.setdefault(sequence.request.request_id, {})
        known = of_request.get(sequence.index)
        if known is None:
            known = of_request[sequence.index] = self._open(sequence)
        if not known.foreign:
            self._copy(known, sequence.token_ids)
            self._fresh.add(known)
        return known

    def _judge(self, known: Known, accepted: int) -> None:
        """Compares what came of a draft with its estimate."""
        known.hits += (1 - _HIT_MEMORY) * (accepted - known.hits)
        known.expected += (1 - _HIT_MEMORY) * (known.proposed - known.expected)
        self._mean_hits += (1 - _HIT_MEMORY) / 8 * (accepted - self._mean_hits)
        self._mean_expected += (1 - _HIT_MEMORY) / 8 * (known.proposed - self._mean_expected)

    def _learn_from(self, known: list[Known]) -> None:
        """Enters what came of the last proposal into the record of its kinds, and each draft into
        its sequence's. Tokens tell, not their number: steps without drafts may have followed."""
        judged = [one for one in known if one.asked == self._asked]
        accepted = np.empty(len(judged), np.int64)
        judge(
            self._texts.tokens,
            np.array([one.asked_end for one in judged], np.int64),
            np.array([one.text.end for one in judged], np.int64),
            np.array([one.row for one in judged], np.int64),
            self._found.tokens,
            self._found.parents,
            self._found.kind,
            self._found.counts,
            np.array([one.kept for one in judged], np.int64),
            self._record,
            accepted,
        )
        for one, count in zip(judged, accepted.tolist(), strict=True):
            if one.kept:
                self._judge(one, count)

    def _open(self, sequence: Sequence) -> Known:
        # The prefix cache's root key tells requests with another cache_salt apart; one bit is
        # theirs, as the sequences' own salts are small.
        space = int.from_bytes(sequence.request.root[:7], "little") | 1 << 60
        text = self._texts.open(space)
        if self._config.ignore_prompt:
            text.indexed = text.first + sequence.num_prompt + SIGNATURE_TOKENS - 1
        text.told = text.first + max(sequence.num_prompt - _HEADER, 0)
        return Known(text, sequence.num_prompt, self._mean_hits, self._mean_expected)

    def _copy(self, known: Known, token_ids: list[int]) -> None:
        """Ends of sequences inside a text part what is before them from what follows."""
        text = known.text
        new: list[int] | NDArray[np.int32] = token_ids[text.end - text.first :]
        if not len(new):
            return
        if len(new) > _FEW:
            new = np.array(new, np.int32)
            known.foreign = int(new.max()) >= self._config.voc_size
            if not known.foreign:
                new[np.isin(new, self._end_array)] = SEPARATOR
        else:
            known.foreign = max(new) >= self._config.voc_size
            if not self._ends.isdisjoint(new):
                new = [SEPARATOR if token in self._ends else token for token in new]
        if known.foreign:
            self.num_foreign += 1
            return
        self._texts.extend(text, new)

    # -- looking up -------------------------------------------------------------------------

    def _limits(
        self, sequences: list[Sequence], known: list[Known], limits: list[int]
    ) -> NDArray[np.int32]:
        """[S] most nodes of each draft."""
        most = np.minimum(np.array(limits, np.int32), MAX_NODES)
        for i, (sequence, one) in enumerate(zip(sequences, known, strict=True)):
            asked = sequence.request.params.num_speculative_tokens
            if one.foreign:
                most[i] = 0
                continue
            if asked is not None and asked < most[i]:
                most[i] = asked
            left = self._longest - len(sequence.token_ids)
            if left < most[i]:
                most[i] = max(left, 0)
        return most

    def _look_up(self, rows: Rows, most: NDArray[np.int32], found: Proposals) -> None:
        """Turbo's drafts, and Raw's for sequences that have none."""
        if self._turbo is not None:
            self._ask(self._turbo, rows, most, found)
        if self._raw is None or (self._turbo is not None and found.counts.all()):
            return
        if self._turbo is None:
            self._ask(self._raw, rows, most, found)
            return
        empty = np.flatnonzero(found.counts == 0)
        others = Proposals.empty(len(empty))
        self._ask(self._raw, rows.some(empty), most[empty], others)
        found.put(empty, others)

    def _ask(
        self,
        source: RawSource | TurboSource,
        rows: Rows,
        most: NDArray[np.int32],
        found: Proposals,
    ) -> None:
        """One source's drafts; large batches are shared by threads."""
        tokens, shared = self._texts.tokens, self._history.shared()
        parts = min(self._threads, -(-len(most) // _PART))
        if parts <= 1:
            source.propose(tokens, rows, shared, most, found)
            return
        edges = [len(most) * part // parts for part in range(parts + 1)]
        pieces = [slice(first, last) for first, last in zip(edges, edges[1:], strict=False)]
        calls = [
            self._pool.submit(
                source.propose, tokens, rows.some(piece), shared, most[piece], found.some(piece)
            )
            for piece in pieces[1:]
        ]
        piece = pieces[0]
        source.propose(tokens, rows.some(piece), shared, most[piece], found.some(piece))
        for call in calls:
            call.result()

    def _keep_what_pays(self, known: list[Known], found: Proposals, num_rows: int) -> Proposals:
        """Cuts drafts to the nodes that make tokens come fastest, which may be none. After a while
        without any nobody is asked for some steps; a single node each then tries anew."""
        survival = found.survival
        trust = np.array([one.hits / max(one.expected, 1e-6) for one in known], np.float32)
        trust = np.clip(trust, _FLOOR, _CEILING)
        kept = self._costs.choose(survival, found.counts, trust, num_rows, self._turn)
        if kept.any() or not found.counts.any():
            self._in_vain = 0
            return found.with_counts(kept, survival)
        self._in_vain += 1
        if self._in_vain <= _PATIENCE:
            return found.with_counts(kept, survival)
        self._in_vain, self._resting = _PATIENCE, _REST
        return found.with_counts(np.minimum(found.counts, 1), survival)

    def _keep_to_target(self, known: list[Known], counts: NDArray[np.int32]) -> None:
        """TACO's target_parallelism: beyond so many rows in a step, drafts shrink with their hits.

        Parents come before their children, so the first nodes of a draft are a draft.
        """
        target = self._config.target_parallelism
        if len(known) + int(counts.sum()) <= target:
            return
        hits = np.array([k.hits for k in known])
        depth = self._config.copy_length
        shares = hits / hits.max() if hits.max() > 0 else np.ones(len(known))
        capped = np.minimum(counts, np.clip(np.floor(depth * shares), 1, depth)).astype(np.int32)
        rows = len(known) + int(capped.sum())
        if rows > target:
            capped = np.maximum(np.floor((capped + 1) * (target / rows)) - 1, 0).astype(np.int32)
        counts[:] = capped

    # -- learning ---------------------------------------------------------------------------

    def _tell(self, known: Known) -> None:
        """Gives the history what it has not got of an output, with some context before it."""
        text = known.text
        if text.end - text.told < 2:
            return
        header = text.first + max(known.num_prompt - _HEADER, 0)
        begin = max(header, text.told - self._overlap)
        told = text.told - begin if text.told > header else 0
        self._history.add(self._texts.tokens[begin : text.end], told, text.space, self._tick)
        text.told = text.end
