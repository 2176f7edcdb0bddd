"""Counter-based noise: a pure function of its four numbers, and statistically random."""

import numpy as np
import torch

from shoal.core.plan import Ints
from shoal.kernels.noise import coins, draw_keys, gumbel

N = 4096


def keys(seed: int | Ints, sample: int | Ints, position: int | Ints) -> torch.Tensor:
    parts = np.broadcast_arrays(*(np.atleast_1d(np.asarray(part, dtype=np.int64)) for part in (seed, sample, position)))
    return torch.from_numpy(draw_keys(*(np.ascontiguousarray(part) for part in parts)))


def uniform(noise: torch.Tensor) -> torch.Tensor:
    return torch.exp(-torch.exp(-noise.double()))


IDS = torch.arange(N, dtype=torch.int32)
ALONG = np.arange(N, dtype=np.int64)
WAYS = {
    "ids": lambda: gumbel(keys(1, 0, 5), IDS)[0],
    "positions": lambda: gumbel(keys(1, 0, ALONG), IDS[7:8])[:, 0],
    "samples": lambda: gumbel(keys(1, ALONG, 5), IDS[7:8])[:, 0],
    "seeds": lambda: gumbel(keys(ALONG, 0, 5), IDS[7:8])[:, 0],
}


def test_noise_is_a_function_of_its_numbers_alone() -> None:
    many = gumbel(keys(np.array([1, 2, 3]), np.array([0, 1, 2]), np.array([9, 8, 7])), IDS)
    for place, (seed, sample, position) in enumerate([(1, 0, 9), (2, 1, 8), (3, 2, 7)]):
        assert torch.equal(gumbel(keys(seed, sample, position), IDS)[0], many[place])
    assert torch.equal(many, gumbel(keys(np.array([1, 2, 3]), np.array([0, 1, 2]), np.array([9, 8, 7])), IDS))


def test_noise_of_some_ids_is_that_of_all() -> None:
    some = torch.tensor([[5, 900, 17], [4, 3, 0]], dtype=torch.int32)
    both = keys(np.array([1, 2]), 0, 5)
    assert torch.equal(gumbel(both, some), gumbel(both, IDS).gather(1, some.long()))


def test_noise_is_finite_also_for_a_large_vocabulary() -> None:
    ids = torch.arange(300_000, dtype=torch.int32)
    noise = gumbel(keys(np.array([0, -1, 2**63 - 1]), 0, np.array([0, 1, 2**31])), ids)
    assert noise.isfinite().all()
    assert noise.dtype == torch.float32


def test_each_number_changes_the_noise() -> None:
    base = gumbel(keys(1, 0, 5), IDS)
    for other in (keys(2, 0, 5), keys(1, 1, 5), keys(1, 0, 6), keys(0, 1, 5), keys(1, 5, 0), keys(5, 0, 1)):
        assert (gumbel(other, IDS) == base).float().mean() < 0.01


def plain_coin(seed: int, sample: int, position: int, probability: float) -> bool:
    """The definition, in whole numbers."""

    def mix(x: int) -> int:
        x = (x ^ x >> 30) * 0xBF58476D1CE4E5B9 % 2**64
        x = (x ^ x >> 27) * 0x94D049BB133111EB % 2**64
        return x ^ x >> 31

    def scramble(x: int) -> int:
        x = (x ^ x >> 16) * 0x7FEB352D % 2**32
        x = (x ^ x >> 15) * 0x846CA68B % 2**32
        return x ^ x >> 16

    golden, key = 0x9E3779B97F4A7C15, seed % 2**64
    for part in (sample, position):
        key = mix((key + golden) % 2**64) ^ part
    key = mix((key + golden) % 2**64)
    mixed = scramble((-1 * 0x9E3779B1 + key) % 2**32)
    return (scramble(mixed ^ key >> 32) >> 9) + 0.5 < probability * 2**23


def test_coins_are_those_of_the_definition_and_fall_as_often_as_asked() -> None:
    for probability in (0.0, 0.125, 0.7, 1.0):
        found = coins(draw_keys(ALONG - 7, ALONG % 3, ALONG * 5), probability)
        wanted = [plain_coin(at - 7, at % 3, at * 5, float(np.float32(probability))) for at in range(N)]
        assert found.tolist() == wanted
        assert abs(sum(wanted) / N - probability) < 4 * (probability * (1 - probability) / N) ** 0.5 + 1e-9


def test_coins_of_neighbours_are_independent() -> None:
    """Of 4 positions in a row all numbers of heads occur as often as they should."""
    heads = coins(draw_keys(ALONG, ALONG * 0, ALONG * 0 + 9), 0.5)
    along = coins(draw_keys(ALONG * 0 + 1, ALONG * 0, ALONG), 0.5)
    for found in (heads, along):
        counts = np.bincount(found.reshape(-1, 4).sum(1), minlength=5)
        expected = N / 4 * np.array([1, 4, 6, 4, 1]) / 16
        assert float(((counts - expected) ** 2 / expected).sum()) < 20  # 4 degrees of freedom


def test_no_two_draws_share_their_keys() -> None:
    grid = np.stack(np.meshgrid(np.arange(40), np.arange(40), np.arange(40)), -1).reshape(-1, 3).astype(np.int64)
    found = draw_keys(*(np.ascontiguousarray(grid[:, i]) for i in range(3)))
    assert len(np.unique(found, axis=0)) == len(grid)


def test_the_noise_is_uniform_in_every_direction() -> None:
    for name, make in WAYS.items():
        counts = torch.histc(uniform(make()).float(), bins=32, min=0, max=1)
        chi = float(((counts - N / 32) ** 2 / (N / 32)).sum())
        assert chi < 70, f"{name}: chi-square {chi:.1f} with 31 degrees of freedom"


def test_neighbours_are_not_correlated_in_any_direction() -> None:
    for name, make in WAYS.items():
        values = uniform(make()) - 0.5
        for lag in (1, 2, 3, 4, 8, 16, 64, 256):
            correlation = float((values[:-lag] * values[lag:]).mean() * 12)
            assert abs(correlation) < 5 / N**0.5, f"{name} at a distance of {lag}: {correlation:.3f}"


def test_neighbours_in_one_direction_are_not_correlated_across_another() -> None:
    table = uniform(gumbel(keys(1, 0, np.arange(64, dtype=np.int64)), IDS)) - 0.5
    correlations = (table @ table.T) * 12 / N
    off = correlations - torch.diag(correlations.diagonal())
    assert float(off.abs().max()) < 6 / N**0.5


def test_pairs_of_neighbours_fill_the_square_evenly() -> None:
    values = uniform(gumbel(keys(3, 0, ALONG), torch.arange(8, dtype=torch.int32)))
    cells = (values[:, 0::2] * 8).long() * 8 + (values[:, 1::2] * 8).long()
    counts = torch.bincount(cells.flatten(), minlength=64).float()
    expected = cells.numel() / 64
    assert float(((counts - expected) ** 2 / expected).sum()) < 120  # 63 degrees of freedom


def test_the_likeliest_id_is_drawn_evenly_over_many_positions() -> None:
    noise = gumbel(keys(1, 0, np.arange(20_000, dtype=np.int64)), torch.arange(50, dtype=torch.int32))
    counts = torch.bincount(noise.argmax(1), minlength=50).float()
    assert float(((counts - 400) ** 2 / 400).sum()) < 100  # 49 degrees of freedom
