"""Aggregation: hand values, loops, packing and micro-batch invariance, empty sequences."""

import pytest
import torch

from rlinf_vl.algorithms import AGGREGATION_MODES, aggregate

LENGTHS = (3, 1, 0, 5)


def padded() -> tuple[torch.Tensor, torch.Tensor]:
    """Losses [4, 6] (float32) of sequences with LENGTHS masked tokens; the mask starts at a different place per row."""
    per_token = torch.randn(4, 6, generator=torch.Generator().manual_seed(0))
    mask = torch.zeros(4, 6, dtype=torch.bool)
    for row, length in enumerate(LENGTHS):
        mask[row, row % 2 : row % 2 + length] = True
    return per_token, mask


def naive(rows: list[list[float]], mode: str) -> float:
    rows = [row for row in rows if row]
    if mode == "token-mean":
        return sum(map(sum, rows)) / sum(map(len, rows))
    if mode == "seq-mean-token-mean":
        return sum(sum(row) / len(row) for row in rows) / len(rows)
    return sum(map(sum, rows)) / len(rows)


@pytest.mark.parametrize(
    ("mode", "expected"),
    [
        ("token-mean", 12 / 4),
        ("seq-mean-token-mean", (2 + 6) / 2),
        ("seq-mean-token-sum", (6 + 6) / 2),
    ],
)
def test_by_hand(mode, expected):
    per_token = torch.tensor([[1.0, 2.0, 3.0], [6.0, 100.0, 100.0]])
    mask = torch.tensor([[True, True, True], [True, False, False]])
    assert aggregate(per_token, mask, None, mode).item() == expected


@pytest.mark.parametrize("mode", AGGREGATION_MODES)
def test_matches_a_loop_and_packing_does_not_show(mode):
    per_token, mask = padded()
    rows = [per_token[i][mask[i]].tolist() for i in range(4)]
    whole = aggregate(per_token, mask, None, mode)
    torch.testing.assert_close(whole, torch.tensor(naive(rows, mode)))

    rows_of = torch.arange(4).unsqueeze(1).expand(4, 6)
    torch.testing.assert_close(aggregate(per_token, mask, rows_of, mode), whole)
    # Packed in another order, with arbitrary ids and the padding left in.
    order = torch.tensor([2, 0, 3, 1])
    packed = (t[order].reshape(-1) for t in (per_token, mask, rows_of * 10 - 7))
    torch.testing.assert_close(aggregate(*packed, mode), whole)
    # Packed without padding: the empty sequence is gone altogether.
    torch.testing.assert_close(aggregate(per_token[mask], mask[mask], rows_of[mask], mode), whole)


@pytest.mark.parametrize("mode", AGGREGATION_MODES)
def test_micro_batches_with_a_global_denominator_sum_to_the_whole(mode):
    per_token, mask = padded()
    leaf = per_token.clone().requires_grad_()
    aggregate(leaf, mask, None, mode).backward()
    denominator = sum(LENGTHS) if mode == "token-mean" else sum(n > 0 for n in LENGTHS)
    for split in ([[0, 1], [2, 3]], [[0], [1, 3], [2]], [[3, 0, 2, 1]]):
        part_leaf = per_token.clone().requires_grad_()
        total = 0.0
        for part in split:
            loss = aggregate(part_leaf[part], mask[part], None, mode, denominator=denominator)
            loss.backward()
            total += loss.item()
        assert total == pytest.approx(aggregate(per_token, mask, None, mode).item(), abs=1e-6)
        torch.testing.assert_close(part_leaf.grad, leaf.grad, atol=1e-6, rtol=1e-6)


def test_local_denominators_would_not_sum_to_the_whole():
    """What the global denominator is for: the mean of micro-batch means is another number."""
    per_token, mask = padded()
    whole = aggregate(per_token, mask, None, "token-mean").item()
    halves = [aggregate(per_token[p], mask[p], None, "token-mean").item() for p in ([0, 1], [2, 3])]
    assert abs(sum(halves) / 2 - whole) > 1e-2


@pytest.mark.parametrize(
    ("mode", "expected"),
    [
        ("token-mean", [[1 / 4, 1 / 4, 1 / 4], [1 / 4, 0, 0]]),
        ("seq-mean-token-mean", [[1 / 6, 1 / 6, 1 / 6], [1 / 2, 0, 0]]),
        ("seq-mean-token-sum", [[1 / 2, 1 / 2, 1 / 2], [1 / 2, 0, 0]]),
    ],
)
def test_gradient_is_the_weight_of_a_token_and_garbage_outside_the_mask_is_ignored(mode, expected):
    nan, inf = float("nan"), float("inf")
    leaf = torch.tensor([[1.0, 2.0, 3.0], [6.0, nan, inf]], requires_grad=True)
    mask = torch.tensor([[True, True, True], [True, False, False]])
    loss = aggregate(leaf, mask, None, mode)
    loss.backward()
    assert torch.isfinite(loss)
    torch.testing.assert_close(leaf.grad, torch.tensor(expected))


@pytest.mark.parametrize("mode", AGGREGATION_MODES)
@pytest.mark.parametrize("shape", [(4,), (2, 3), (0,), (0, 3)])
@pytest.mark.parametrize("denominator", [None, 0, 8, torch.tensor(0)])
def test_an_empty_mask_gives_zero_and_zero_gradients(mode, shape, denominator):
    leaf = torch.full(shape, float("nan")).requires_grad_()
    loss = aggregate(
        leaf, torch.zeros(shape, dtype=torch.bool), None, mode, denominator=denominator
    )
    loss.backward()
    assert loss.item() == 0.0
    assert torch.equal(leaf.grad, torch.zeros(shape))


def test_denominator_may_be_a_tensor_or_below_one():
    ones, mask = torch.ones(3), torch.ones(3, dtype=torch.bool)
    assert aggregate(ones, mask, None, "token-mean", denominator=torch.tensor(6)).item() == 0.5
    assert aggregate(ones, mask, None, "token-mean", denominator=0.5).item() == 6.0


def test_half_precision_is_summed_in_float32():
    loss = aggregate(
        torch.ones(1000, dtype=torch.bfloat16),
        torch.ones(1000, dtype=torch.bool),
        None,
        "token-mean",
    )
    assert loss.dtype == torch.float32 and loss.item() == 1.0


def test_wrong_input_is_named():
    ones, mask = torch.ones(3), torch.ones(3, dtype=torch.bool)
    with pytest.raises(
        ValueError, match="token-mean, seq-mean-token-mean, seq-mean-token-sum; got 'mean'"
    ):
        aggregate(ones, mask, None, "mean")
    with pytest.raises(ValueError, match=r"per_token has shape \(3,\), mask \(2,\)"):
        aggregate(ones, mask[:2], None, "token-mean")
    with pytest.raises(ValueError, match=r"segment_ids have shape \(2,\), mask \(3,\)"):
        aggregate(ones, mask, torch.zeros(2, dtype=torch.int64), "seq-mean-token-sum")
    with pytest.raises(ValueError, match="segment_ids must be integers"):
        aggregate(ones, mask, ones, "seq-mean-token-sum")
    with pytest.raises(ValueError, match="boolean"):
        aggregate(ones, ones, None, "token-mean")
    with pytest.raises(ValueError, match="denominator"):
        aggregate(ones, mask, None, "token-mean", denominator=-1)
