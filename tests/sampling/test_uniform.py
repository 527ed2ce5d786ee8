from __future__ import annotations

from tokenspeed.sampling.uniform import uniform


def test_values_are_fixed_for_ever() -> None:
    assert [
        uniform(seed, position) for seed, position in ((0, 0), (0, 1), (1, 0), (-1, 5), (2**63 - 1, 10**6))
    ] == VALUES


VALUES = [0.6524484863740322, 0.7012121095215252, 0.36818951565166946, 0.15403342580516755, 0.39854775898749717]


def test_even_over_positions_and_over_seeds() -> None:
    """4096 draws in 16 bins, along both arguments and the diagonal (fixed: it either holds or it does not)."""
    for sequence in (
        [uniform(9, i) for i in range(4096)],
        [uniform(i, 9) for i in range(4096)],
        [uniform(i, i) for i in range(4096)],
        [uniform(-i, 4096 - i) for i in range(4096)],
    ):
        assert all(0.0 <= value < 1.0 for value in sequence)
        bins = [0] * 16
        for value in sequence:
            bins[int(value * 16)] += 1
        assert sum((count - 256) ** 2 / 256 for count in bins) < 37.7  # 15 degrees of freedom: p = 0.001


def test_neighbouring_seeds_and_positions_are_unrelated() -> None:
    """n > 1 uses seed + index: shifting the seed must not shift the sequence."""
    first = [uniform(100, i) for i in range(64)]
    second = [uniform(101, i) for i in range(64)]
    assert not set(first) & set(second)
