"""Features by hash: once in, out again as they were; what goes, what stays, what is spilled."""

import pytest
import torch

from rlinf_vl.models.families import VisionFeatures
from rlinf_vl.models.vision_cache import VisionCache

TOKENS, WIDTH = 4, 8
IMAGE_BYTES = 2 * TOKENS * WIDTH * 4  # tokens and one deepstack layer, float32


def features(seed, images=1):
    torch.manual_seed(seed)
    return VisionFeatures(torch.randn(images * TOKENS, WIDTH), (torch.randn(images * TOKENS, WIDTH),))


def test_what_is_put_together_comes_back_apart_and_in_the_order_asked():
    cache, three = VisionCache(2**20, "cpu"), features(0, 3)
    cache.put(["a", "b", "c"], three, [TOKENS] * 3)
    got = cache.get(["c", "a"])
    rows = torch.tensor([*range(8, 12), *range(4)])
    assert torch.equal(got.tokens, three.tokens[rows]) and torch.equal(got.deepstack[0], three.deepstack[0][rows])
    assert cache.missing(["b", "x", "a", "x"]) == ["x"]
    with pytest.raises(KeyError, match="x"):
        cache.get(["x"])
    cache.clear()
    assert cache.missing(["a"]) == ["a"]


def test_the_oldest_that_no_step_needs_goes_first():
    cache = VisionCache(2 * IMAGE_BYTES, "cpu")
    cache.hold(["a", "b"])
    cache.put(["a", "b"], features(0, 2), [TOKENS] * 2)
    cache.hold(["c", "a"])
    cache.put(["c"], features(1), [TOKENS])
    assert cache.missing(["a", "b", "c"]) == ["b"]


def test_what_the_step_needs_stays_even_above_the_limit():
    cache = VisionCache(0, "cpu")
    cache.hold(["a", "b"])
    cache.put(["a", "b"], features(0, 2), [TOKENS] * 2)
    assert cache.missing(["a", "b"]) == []
    cache.hold([])
    assert cache.missing(["a", "b"]) == ["a", "b"]


def test_features_carry_no_graph():
    cache = VisionCache(2**20, "cpu")
    grown = features(0)
    cache.put(["a"], VisionFeatures(grown.tokens.requires_grad_(), grown.deepstack), [TOKENS])
    assert not cache.get(["a"]).tokens.requires_grad
