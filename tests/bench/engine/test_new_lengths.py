from bench.engine.new_lengths import random_lengths


def test_lengths_differ_and_stay_within_their_bounds() -> None:
    lengths = random_lengths(200, 4000, seed=3)
    assert len(set(lengths)) == 200 and 32 <= min(lengths) < 64 and 3000 < max(lengths) <= 4000
    assert lengths == random_lengths(200, 4000, seed=3) != sorted(lengths)
