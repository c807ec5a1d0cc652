"""Keys and values in pages: attention over it against PyTorch's own, whatever rows come, grow and go."""

import numpy as np
import pytest
import torch

from rlinf_vl.engines.torch import pages
from rlinf_vl.engines.torch.pages import PAGE, Pages

HEADS, REPEAT, DIM = 2, 3, 8
SIZE = PAGE["cpu"]


class Dense:
    """The same rows, each with its keys and values [H_kv, n, D] of two layers."""

    def __init__(self) -> None:
        self.pages = Pages((0, 2), HEADS, DIM, torch.float32, torch.device("cpu"), SIZE)
        self.rows: list[dict[int, list[torch.Tensor]]] = []

    def add(self, n: int) -> None:
        self.pages.add(n)
        self.rows += [
            {layer: [torch.zeros(HEADS, 0, DIM)] * 2 for layer in (0, 2)} for _ in range(n)
        ]

    def fill(self, rows: list[int], lengths: list[int]) -> None:
        tokens = torch.randn(2, 2, sum(lengths) + 5, HEADS, DIM)
        order = torch.randperm(sum(lengths) + 5)
        own = list(order[: sum(lengths)].split(lengths))
        self.pages.fill(np.array(rows), tokens, own)
        for row, index in zip(rows, own, strict=True):
            for layer, both in zip((0, 2), tokens, strict=True):
                self.rows[row][layer] = list(both[:, index].transpose(1, 2))

    def keep(self, rows: list[int]) -> None:
        self.pages.keep(np.array(rows, np.int64))
        self.rows = [self.rows[row] for row in rows]

    def step(self) -> None:
        """A token for every row; compares attention in each layer."""
        self.pages.begin_step()
        n = len(self.rows)
        for layer in (0, 2):
            q = torch.randn(n, HEADS, REPEAT, DIM)
            k, v = torch.randn(2, n, HEADS, DIM)
            part = self.pages.attend(layer, q, k, v, 0.3)
            for i, row in enumerate(self.rows):
                keys, values = row[layer] = [
                    torch.cat([x, new[i, :, None]], 1)
                    for x, new in zip(row[layer], (k, v), strict=True)
                ]
                expected = torch.nn.functional.scaled_dot_product_attention(
                    q[i], keys, values, scale=0.3
                )
                torch.testing.assert_close(
                    part.out[i] / part.total[i], expected, atol=1e-6, rtol=1e-5
                )
                # What merging goes by.
                scores = (q[i] @ keys.transpose(-1, -2) * 0.3).logsumexp(-1, keepdim=True)
                torch.testing.assert_close(
                    part.top[i] + part.total[i].log(), scores, atol=1e-5, rtol=1e-5
                )


@pytest.fixture
def dense() -> Dense:
    torch.manual_seed(0)
    return Dense()


def test_rows_of_one_page_and_of_several(dense):
    dense.add(5)
    for _ in range(2 * SIZE + 3):
        dense.step()
    dense.add(3)
    for _ in range(SIZE + 1):
        dense.step()
    assert dense.pages.lengths.tolist() == [3 * SIZE + 4] * 5 + [SIZE + 1] * 3


@pytest.mark.parametrize("seed", range(4))
def test_rows_come_and_go(dense, seed):
    draw = np.random.default_rng(seed)
    for _ in range(12):
        first, n = len(dense.rows), int(draw.integers(1, 6))
        dense.add(n)
        filled = [i for i in range(first, first + n) if draw.random() < 0.5]
        if filled:
            dense.fill(filled, [int(draw.integers(1, 3 * SIZE)) for _ in filled])
        for _ in range(int(draw.integers(1, 6))):
            dense.step()
        kept = [i for i in range(len(dense.rows)) if draw.random() < 0.6]
        dense.keep(kept)
        for i in kept[:1]:
            own = dense.rows[0][2]
            n = own[0].shape[1] - int(draw.integers(0, own[0].shape[1] + 1))
            start = int(draw.integers(0, n + 1))
            nothing, read = dense.pages.read([0, 0], [n, start], [n, n])
            assert nothing.shape[2] == 0
            for part, expected in zip(read.unbind(1), own, strict=True):
                assert torch.equal(part[1], expected[:, start:n].transpose(0, 1)), i
    dense.keep([])
    dense.add(2)
    dense.step()


@pytest.mark.parametrize("spare", [0, pages.SPARE_BYTES])
def test_a_long_row_does_not_make_the_others_longer(dense, monkeypatch, spare):
    """100 rows of a page and one of 20 are 120 pages; once most of them are gone, attention looks at the others alone."""
    dense.add(101)
    dense.fill([100], [20 * SIZE - 1])
    dense.step()
    assert dense.pages._used == 120 <= dense.pages._keys.shape[1] <= 2 * 120
    monkeypatch.setattr(pages, "SPARE_BYTES", spare)
    dense.keep([3, 4, 100])
    assert (dense.pages._keys.shape[1] == 22) == (spare == 0)
    dense.step()
    assert dense.pages._used == 23


def test_prompts_are_rows_to_which_nothing_is_added(dense):
    """Several queries of each; some leave, others come, of one page and of several."""
    for lengths in ([3], [40, 2 * SIZE, 5], [SIZE]):
        first = len(dense.rows)
        dense.add(len(lengths))
        dense.fill(list(range(first, first + len(lengths))), lengths)
        dense.pages.update_device_table()
        q = torch.randn(len(dense.rows), HEADS, REPEAT * 4, DIM)
        part = dense.pages.attend_stored(2, q, 0.3)
        for i, row in enumerate(dense.rows):
            expected = torch.nn.functional.scaled_dot_product_attention(q[i], *row[2], scale=0.3)
            torch.testing.assert_close(part.out[i] / part.total[i], expected, atol=1e-6, rtol=1e-5)
        dense.keep(list(range(1, len(dense.rows))))
