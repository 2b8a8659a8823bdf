"""The choice of replicas: the index against a plain model, fairness, and accounts that end at 0."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from hetero_llm.engine.processes.replica_choice import (
    PIECE_BYTES,
    Assignment,
    ChoiceWeights,
    PrefixIndex,
    ReplicaChooser,
    piece_hashes,
)

# Prompts as paths of a small tree: "0110" shares its first two pieces with "0101".
PATHS = st.text("01", min_size=1, max_size=6)


def pieces_of(path: str) -> list[int]:
    return piece_hashes(b"".join(letter.encode() * PIECE_BYTES for letter in path))


@given(st.binary(max_size=4 * PIECE_BYTES), st.binary(max_size=4 * PIECE_BYTES))
def test_equal_hashes_mean_an_equal_beginning(one: bytes, other: bytes) -> None:
    ours, theirs = piece_hashes(one), piece_hashes(other)
    assert len(ours) == len(one) // PIECE_BYTES
    for count, (mine, their) in enumerate(zip(ours, theirs), 1):
        end = count * PIECE_BYTES
        assert (mine == their) == (one[:end] == other[:end])


def test_the_root_and_the_place_count() -> None:
    data = b"x" * PIECE_BYTES
    assert piece_hashes(data, "adapter") != piece_hashes(data)
    assert len(set(piece_hashes(data * 3))) == 3
    assert len(piece_hashes(data * 3, most=2)) == 2


@given(st.lists(PATHS, max_size=40), st.integers(1, 12), PATHS)
def test_the_index_is_a_list_of_the_youngest_pieces(
    paths: list[str], capacity: int, asked: str
) -> None:
    index = PrefixIndex(capacity)
    youngest_last: list[int] = []
    for path in paths:
        pieces = pieces_of(path)
        index.add(pieces)
        kept = pieces[:capacity]
        youngest_last = [one for one in youngest_last if one not in kept] + kept[::-1]
        youngest_last = youngest_last[-capacity:]
    assert len(index) == len(youngest_last)
    assert all(piece in index for piece in youngest_last)
    wanted = 0
    for piece in pieces_of(asked):  # one after the other, not by bisection
        if piece not in youngest_last:
            break
        wanted += 1
    assert index.match(pieces_of(asked)) == wanted


@given(
    st.lists(
        st.tuples(st.sampled_from(("begin", "answer", "end", "forget")), PATHS, st.integers(0, 9)),
        max_size=80,
    ),
    st.integers(1, 4),
)
@settings(max_examples=200)
def test_accounts_of_random_traffic(events: list[tuple[str, str, int]], replicas: int) -> None:
    chooser = ReplicaChooser(replicas, capacity=16)
    running: list[tuple[Assignment, bool]] = []
    for kind, path, number in events:
        if kind == "begin":
            session = f"s{number}" if number < 3 else ""
            before = [chooser.score(each, pieces_of(path), session) for each in range(replicas)]
            made = chooser.choose(pieces_of(path), session)
            assert before[made.replica] == max(before)
            running.append((made, False))
        elif kind == "forget":
            chooser.forget(number % replicas)
        elif running:
            at = number % len(running)
            made, answered = running.pop(at)
            if kind == "answer" and not answered:
                chooser.answered(made)
                running.insert(at, (made, True))
            else:
                chooser.finished(made, answered=answered)
        chooser.check_integrity()
        for each in range(replicas):
            mine = [(made, done) for made, done in running if made.replica == each]
            waiting = sum(made.pieces_to_compute for made, done in mine if not done)
            assert chooser.load(each) == waiting + chooser.weights.request * len(mine)
            assert chooser.num_requests(each) == len(mine)
    for made, answered in running:
        chooser.finished(made, answered=answered)
    assert [chooser.load(each) for each in range(replicas)] == [0.0] * replicas


@given(st.lists(PATHS, min_size=1, max_size=60), st.integers(2, 5))
def test_no_replica_starves(paths: list[str], replicas: int) -> None:
    """Nothing ends meanwhile, and all belong to one session: the loads still stay together."""
    chooser = ReplicaChooser(replicas)
    weights = chooser.weights
    most_worth = weights.prefix * 6 + weights.session
    for path in paths:
        made = chooser.choose(pieces_of(path), "one")
        loads = [chooser.load(each) for each in range(replicas)]
        own = made.pieces_to_compute + weights.request
        assert loads[made.replica] - own <= min(loads) + most_worth


def test_a_prefix_stays_together_and_strangers_spread() -> None:
    chooser = ReplicaChooser(2)
    first = chooser.choose(pieces_of("000000"))
    chooser.finished(first, answered=False)
    other = chooser.choose(pieces_of("111111"))
    chooser.finished(other, answered=False)
    assert {first.replica, other.replica} == {0, 1}, "of equals, the one chosen longer ago"
    for path, expected in (("000001", first), ("111110", other)):
        again = chooser.choose(pieces_of(path))
        assert (again.replica, again.num_matched) == (expected.replica, 5)
        chooser.finished(again, answered=False)


def test_a_loaded_replica_loses_its_prefix() -> None:
    chooser = ReplicaChooser(2, weights=ChoiceWeights(request=2.0))
    chosen = [chooser.choose(pieces_of("0000")).replica for _ in range(12)]
    assert set(chosen) == {0, 1} and abs(chosen.count(0) - chosen.count(1)) <= 2


def test_a_session_returns_while_its_replica_is_not_overloaded() -> None:
    chooser = ReplicaChooser(3)
    home = chooser.choose((), "chat").replica
    others = [chooser.choose(()).replica for _ in range(6)]
    assert set(others) == {0, 1, 2}
    assert chooser.choose((), "chat").replica == home
    for _ in range(40):
        chooser.choose((), "chat")
    assert chooser.load(home) - min(map(chooser.load, range(3))) <= 64.0 + chooser.weights.request


def test_only_usable_replicas_are_chosen() -> None:
    chooser = ReplicaChooser(3)
    for _ in range(5):
        assert chooser.choose(pieces_of("0"), usable=(2,)).replica == 2
    chooser.forget(2)
    assert chooser.choose(pieces_of("0")).num_matched == 0


def test_the_length_of_a_request_that_has_no_pieces() -> None:
    chooser = ReplicaChooser(2)
    made = chooser.choose((), num_pieces=7.5)
    assert chooser.load(made.replica) == 7.5 + chooser.weights.request
    chooser.answered(made)
    assert chooser.load(made.replica) == chooser.weights.request


def test_one_replica_gets_every_request() -> None:
    chooser = ReplicaChooser(1, capacity=1)
    for _ in range(3):
        made = chooser.choose((), num_pieces=3.0)
        assert made == Assignment(0, 0, 3.0)
        chooser.finished(made, answered=False)
        chooser.forget(0)
    chooser.check_integrity()
