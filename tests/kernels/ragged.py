"""Builds ragged batches over shuffled blocks for kernel and model tests. Knows only kernels.Batch."""

import random

import torch

from shoal.kernels import Batch


class Tables:
    """Gives each sequence its own blocks, in random order, out of one cache."""

    def __init__(self, most_tokens: list[int], block_size: int, seed: int = 0) -> None:
        needed = [-(-tokens // block_size) for tokens in most_tokens]
        self.blocks = sum(needed) + 3
        ids = list(range(self.blocks))
        random.Random(seed).shuffle(ids)
        self.block_size = block_size
        self.tables = [[ids.pop() for _ in range(count)] for count in needed]

    def batch(self, pieces: list[tuple[int, int, int]]) -> Batch:
        """pieces: (sequence, computed before this pass, new tokens)."""
        positions: list[int] = []
        slots: list[int] = []
        starts, contexts = [0], []
        for sequence, before, new in pieces:
            places = range(before, before + new)
            table = self.tables[sequence]
            positions += places
            slots += [table[at // self.block_size] * self.block_size + at % self.block_size for at in places]
            starts.append(starts[-1] + new)
            contexts.append(before + new)
        widest = max(len(self.tables[sequence]) for sequence, _, _ in pieces)
        # past its end a table holds nonsense, which no kernel may read
        rows = [self.tables[sequence] + [10**9] * (widest - len(self.tables[sequence])) for sequence, _, _ in pieces]
        return Batch(
            torch.tensor(positions), torch.tensor(slots), starts, contexts, torch.tensor(rows), self.block_size
        )
