"""A slow reference of `TreePool` with plain objects, and a fake draft model."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

import numpy as np

from hetero_llm.cpu.draft_worker.tree_ops import CAPACITY, WINDOW
from hetero_llm.spec_decode.draft_model.node_buckets import BucketStats, bucket_of, external_bucket

F = np.float32
ROOM, LEAST, LEAST_RUN, BESIDE = 64, F(0.01), F(0.002), 1.05
Path = tuple[int, ...]


@dataclass(eq=False)
class Node:
    """`parent` is None for a child of the root."""

    id: int
    parent: Node | None
    token: int
    kind: int
    position: int
    place: int = -1
    given: np.float32 = F(0)
    path_prob: np.float32 = F(0)

    def path(self) -> Path:
        return (*(self.parent.path() if self.parent else ()), self.token)

    def above(self) -> list[Node]:
        """From the root's child down to this node."""
        return [*(self.parent.above() if self.parent else []), self]


@dataclass
class Tree:
    """Of one slot."""

    text: list[int]
    noisy: bool
    depth: int
    nodes: list[Node] = field(default_factory=list)
    ready: bool = False
    next_id: int = 1
    sent: int = 0
    sent_length: int = 0
    has_external: bool = False

    @property
    def run(self) -> list[Node]:
        """By place."""
        return sorted((n for n in self.nodes if n.place >= 0), key=lambda n: n.place)

    def children(self, parent: Node | None) -> list[Node]:
        return [node for node in self.nodes if node.parent is parent]


def rate_of(stats: BucketStats, kind: int) -> np.float32:
    accepted, tried = stats.table[kind]
    return F((accepted + F(1)) / (tried + F(2)))


class PoolReference:
    """`TreePool` with plain objects."""

    def __init__(self, max_depth: int, max_positions: int, vocab_size: int) -> None:
        self.max_depth, self.max_positions = max_depth, max_positions
        self.vocab_size = vocab_size
        self.stats = BucketStats()
        self.trees: dict[int, Tree] = {}

    def open(self, slot: int, text: list[int], noisy: bool, depth: int) -> None:
        self.trees[slot] = Tree(list(text), noisy, min(depth, self.max_depth))

    def commit(self, slot: int, tokens: list[int]) -> tuple[list[tuple[int, int]], int, bool]:
        """Moves, how many of them are the path's, and whether the root is ready."""
        tree = self.trees[slot]
        root: Node | None = None
        path: list[Node] = []
        for token in tokens:
            siblings = tree.children(root)
            for node in siblings:
                self._judge(node.kind, node.token == token)
            hits = [node for node in siblings if node.token == token]
            if not hits:
                break
            root = hits[-1]
            path.append(root)
        run = [node for node in path if node.place >= 0]
        moves = [(node.place, target) for target, node in enumerate(run)]
        tree.ready = tree.ready and len(run) == len(tokens)
        tree.text += tokens
        kept = tree.nodes
        if len(path) < len(tokens):
            kept = []
        elif path:
            kept = [n for n in tree.nodes if n is not root and root in n.above()]
        tree.nodes = kept
        for node in kept:
            if node.parent is root:
                node.parent = None
        for place, node in enumerate(tree.run):
            moves.append((node.place, len(run) + place))
            node.place = place
        tree.has_external = tree.has_external and bool(kept)
        if len(path) == len(tokens):
            self._rate(tree)
        return moves, len(run), tree.ready

    def choose(
        self,
        seconds: np.ndarray,
        weights: np.ndarray | None = None,
        urgent: np.ndarray | None = None,
        gained: float = 0.0,
    ) -> list[tuple[int, Node, int, int]]:
        """Slot, node, place and ancestor bits of each."""
        most = len(seconds) - 1
        chosen: list[tuple[int, Node]] = []
        for wanted in (True, False):
            keys: list[tuple[float, int, int, Node]] = []
            for slot, tree in self.trees.items():
                weight = F(1) if weights is None else weights[slot]
                if (urgent is not None and urgent[slot]) != wanted or not weight > 0:
                    continue
                own = [
                    (-float(F(node.path_prob * weight)), slot, tree.nodes.index(node), node)
                    for node in self._frontier(tree)
                ]
                keys += sorted(own, key=lambda key: key[:3])[: WINDOW - len(tree.run)]
            keys.sort(key=lambda key: key[:3])
            keys = keys[: most - len(chosen)]
            count = 0
            if chosen:
                while count < len(keys) and (
                    seconds[len(chosen) + count + 1] <= BESIDE * seconds[len(chosen)]
                ):
                    count += 1
            else:
                sums = np.cumsum([gained, *(-key[0] for key in keys)])
                rates = sums / np.maximum(seconds[: len(sums)], 1e-9)
                count = int(np.argmax(rates))
            chosen += [(key[1], key[3]) for key in keys[:count]]
        chosen.sort(key=lambda pair: (pair[0], pair[1].id))
        rows: list[tuple[int, Node, int, int]] = []
        for slot, node in chosen:
            place = len(self.trees[slot].run) + sum(row[0] == slot for row in rows)
            bits = sum(1 << n.place for n in node.above()[:-1])
            rows.append((slot, node, place, bits | 1 << place))
        return rows

    def _frontier(self, tree: Tree) -> list[Node]:
        length = len(tree.text)
        return [
            node
            for node in tree.nodes
            if tree.ready
            and node.place < 0
            and (node.parent is None or node.parent.place >= 0)
            and node.position - length + 1 < tree.depth
            and node.position < self.max_positions
            and node.path_prob >= LEAST_RUN
        ]

    def expand(
        self,
        ready: list[int],
        rows: list[tuple[int, Node, int, int]],
        tokens: np.ndarray,
        log_probs: np.ndarray,
    ) -> None:
        for slot in ready:
            self.trees[slot].ready = True
        for _, node, place, _ in rows:
            node.place = place
        grown = [(slot, None) for slot in ready] + [(slot, node) for slot, node, _, _ in rows]
        for (slot, parent), names, odds in zip(grown, tokens.tolist(), log_probs):
            self._add_children(self.trees[slot], parent, names, odds)

    def _add_children(
        self, tree: Tree, parent: Node | None, tokens: list[int], log_probs: np.ndarray
    ) -> None:
        if len(tree.nodes) + len(tokens) > CAPACITY:
            self._evict(tree)
        left = F(1)
        external = tree.children(parent)
        for rank, (token, log_prob) in enumerate(zip(tokens, log_probs)):
            kind = bucket_of(float(log_prob), rank, tree.noisy)
            if kind < 0:
                continue
            rate = min(rate_of(self.stats, kind), left)
            same = [node for node in external if node.token == token]
            if same:
                same[-1].kind = kind
            elif rank == 0 or rate >= LEAST:
                path_prob = F((parent.path_prob if parent else F(1)) * rate)
                self._add(tree, parent, token, kind).path_prob = path_prob
            else:
                continue
            left = F(left - rate)
        if tree.has_external:
            self._rate(tree)

    def add_external_nodes(
        self, slot: int, length: int, nodes: list[tuple[int, int, np.float32]]
    ) -> int:
        """Nodes: parent, token, path probability."""
        tree = self.trees.get(slot)
        if tree is None or length != len(tree.text):
            return 0
        places: list[Node | None] = []
        taken = 0
        for i, (above, token, path_prob) in enumerate(nodes):
            places.append(None)
            if above < -1 or above >= i or not 0 <= token < self.vocab_size:
                continue
            whole = nodes[above][2] if above >= 0 else F(1)
            if not whole > 0:
                continue
            share = F(path_prob / whole)
            kind = external_bucket(min(float(share), 1.0))
            parent = places[above] if above >= 0 else None
            if len(tree.nodes) == CAPACITY:
                self._rate(tree)
                self._evict(tree)
            if kind < 0 or (above >= 0 and (parent is None or parent not in tree.nodes)):
                continue
            same = [node for node in tree.children(parent) if node.token == token]
            node = same[-1] if same else self._add(tree, parent, token, kind)
            node.given = max(node.given, min(share, F(1)))
            places[i] = node
            taken += 1
        tree.has_external = True
        self._rate(tree)
        return taken

    def unsent(self) -> list[tuple[int, int, list[tuple[int, int, int, int]]]]:
        """Slot, length and nodes: id, parent, token and bucket."""
        messages = []
        for slot, tree in sorted(self.trees.items()):
            new = [node for node in tree.nodes if node.id > tree.sent]
            length = len(tree.text) if tree.ready else 0
            if not new and (tree.nodes or tree.sent_length >= length):
                continue
            root = -len(tree.text)
            nodes = [(n.id, n.parent.id if n.parent else root, n.token, n.kind) for n in new]
            messages.append((slot, length, nodes))
            tree.sent = max([tree.sent, *(node.id for node in new)])
            tree.sent_length = length
        return messages

    def _add(self, tree: Tree, parent: Node | None, token: int, kind: int) -> Node:
        position = parent.position + 1 if parent else len(tree.text)
        node = Node(tree.next_id, parent, token, kind, position)
        tree.next_id += 1
        tree.nodes.append(node)
        return node

    def _evict(self, tree: Tree) -> None:
        waiting = [node for node in tree.nodes if node.place < 0]
        waiting.sort(key=lambda node: (-node.path_prob, node.id))
        lost = set(waiting[CAPACITY - ROOM - len(tree.run) :])
        tree.nodes = [node for node in tree.nodes if node not in lost]

    def _rate(self, tree: Tree) -> None:
        left: dict[Node | None, np.float32] = {}
        for node in tree.nodes:
            before = left.get(node.parent, F(1))
            rate = max(min(rate_of(self.stats, node.kind), before), node.given)
            left[node.parent] = max(F(before - rate), F(0))
            node.path_prob = F(rate * (node.parent.path_prob if node.parent else F(1)))

    def _judge(self, kind: int, hit: bool) -> None:
        cell = self.stats.table[kind]
        if cell[1] >= 512:
            cell *= F(0.5)
        cell += F(hit), F(1)


class Oracle:
    """A fake draft model: its candidates depend on the whole sequence and nothing else."""

    def __init__(self, seed: int, vocab_size: int, candidates: int) -> None:
        self.seed, self.vocab_size, self.candidates = seed, vocab_size, candidates

    def after(self, text: Path) -> tuple[np.ndarray, np.ndarray]:
        """[K] tokens and their logarithmic probabilities, float32, the most likely first."""
        rng = np.random.default_rng([self.seed, *text])
        tokens = rng.permutation(self.vocab_size)[: self.candidates].astype(np.int32)
        path_probs = np.sort(rng.dirichlet(np.full(self.candidates + 1, 0.4)))[::-1]
        with np.errstate(divide="ignore"):
            log_probs = np.log(path_probs[: self.candidates]).astype(np.float32)
        if rng.random() < 0.05:
            log_probs[-1] = -math.inf
        return tokens, log_probs

    def step(self, texts: list[Path]) -> tuple[np.ndarray, np.ndarray]:
        """[N, K] each."""
        found = [self.after(text) for text in texts]
        shape = len(texts), self.candidates
        tokens = np.array([tokens for tokens, _ in found], np.int32).reshape(shape)
        return tokens, np.array([odds for _, odds in found], np.float32).reshape(shape)
