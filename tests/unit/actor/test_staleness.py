"""What a rank asserts of the tokens that it trains on."""

import numpy as np
import pytest

from rlinf_vl.actor.rank import check_fresh
from rlinf_vl.types import Group, TokenSequence, Trajectory


def group(*versions: int) -> Group:
    """A prompt of two tokens, and one sampled token by each of these versions."""
    n = len(versions)
    ids, mask = np.arange(2 + n, dtype=np.int32), np.array([False, False] + [True] * n)
    own = np.array([-1, -1, *versions], np.int32)
    sequence = TokenSequence(ids, mask, np.zeros(2 + n, np.float32), own)
    return Group("train-5-0", "p", 2, (Trajectory((sequence,), (), 1.0, {}, "stop"),))


def test_tokens_of_one_answer_may_be_from_several_weights_but_none_from_weights_beyond_the_bound():
    check_fresh([group(3, 4, 4), group()], oldest=3)
    with pytest.raises(
        AssertionError, match=r"train-5-0 has tokens of version 2; runner\.max_staleness allows 3"
    ):
        check_fresh([group(4, 4), group(4, 2, 3)], oldest=3)
