"""Features by hash: once in, out again as they were; what goes, what stays, what is spilled."""

import pytest
import torch

from rlinf_vl.models.family import VisionFeatures
from rlinf_vl.models.vision_cache import VisionCache

TOKENS, WIDTH = 4, 8
IMAGE_BYTES = 2 * TOKENS * WIDTH * 4  # tokens and one deepstack layer, float32


def features(seed, images=1):
    torch.manual_seed(seed)
    return VisionFeatures(
        torch.randn(images * TOKENS, WIDTH), (torch.randn(images * TOKENS, WIDTH),)
    )


def test_what_is_put_together_comes_back_apart_and_in_the_order_asked():
    cache, three = VisionCache(2**20, "cpu"), features(0, 3)
    cache.put(["a", "b", "c"], three, [TOKENS] * 3)
    got = cache.get(["c", "a"])
    rows = torch.tensor([*range(8, 12), *range(4)])
    assert torch.equal(got.tokens, three.tokens[rows]) and torch.equal(
        got.deepstack[0], three.deepstack[0][rows]
    )
    assert cache.missing(["b", "x", "a", "x"]) == ["x"]
    with pytest.raises(KeyError, match="x"):
        cache.get(["x"])
    cache.clear()
    assert cache.missing(["a"]) == ["a"]


def test_the_oldest_that_no_step_needs_goes_first():
    cache = VisionCache(2 * IMAGE_BYTES, "cpu")
    cache.pin(["a", "b"])
    cache.put(["a", "b"], features(0, 2), [TOKENS] * 2)
    cache.pin(["c", "a"])
    cache.put(["c"], features(1), [TOKENS])
    assert cache.missing(["a", "b", "c"]) == ["b"]


def test_what_the_step_needs_stays_even_above_the_limit():
    cache = VisionCache(0, "cpu")
    cache.pin(["a", "b"])
    cache.put(["a", "b"], features(0, 2), [TOKENS] * 2)
    assert cache.missing(["a", "b"]) == []
    cache.pin([])
    assert cache.missing(["a", "b"]) == ["a", "b"]


@pytest.fixture(params=["cpu", "accelerator"])
def device(request, monkeypatch):
    """A CPU, and `meta` in the place of an accelerator: its tensors have sizes, and copies of them go to host memory."""
    if request.param == "cpu":
        return "cpu"
    monkeypatch.setattr(torch.Tensor, "cpu", lambda x: torch.zeros(x.shape))
    monkeypatch.setattr(torch.Tensor, "pin_memory", lambda x: x)
    return "meta"


def bytes_of(cache):
    """(on the device, on the host, both counted by what the cache's attributes hold)."""
    held = [x for store in vars(cache).values() if isinstance(store, dict) for x in store.values()]
    stacks = [x for x in held if isinstance(x, torch.Tensor)]
    assert all(x.untyped_storage().nbytes() == x.nbytes for x in stacks), (
        "a view keeps more than itself"
    )
    on_device = sum(x.nbytes for x in stacks if x.device == cache.device)
    return on_device, sum(x.nbytes for x in stacks) - on_device


def test_host_memory_holds_no_more_than_the_step_needs_beyond_the_limit(device):
    """Twice the limit anew in each of six steps: what a step spilled goes with the step."""
    cache = VisionCache(IMAGE_BYTES, device)
    for step in range(6):
        names = [f"{step}/{i}" for i in range(2)]
        cache.pin(names)
        assert cache.missing(names) == names
        two = features(step, 2)
        cache.put(
            names,
            VisionFeatures(two.tokens.to(device), tuple(x.to(device) for x in two.deepstack)),
            [TOKENS] * 2,
        )
        assert cache.missing(names) == [] and cache.get(names).tokens.device == torch.device(device)
        assert sum(bytes_of(cache)) <= 2 * IMAGE_BYTES
        if device == "meta":
            assert bytes_of(cache) == (IMAGE_BYTES, IMAGE_BYTES)
    cache.pin([])
    assert sum(bytes_of(cache)) <= IMAGE_BYTES


def test_what_was_spilled_comes_back_to_the_device_when_there_is_room(device):
    cache = VisionCache(2 * IMAGE_BYTES, device)
    names = ["a", "b", "c"]
    cache.pin(names)
    made = features(0, 3)
    on_device = VisionFeatures(made.tokens.to(device), tuple(x.to(device) for x in made.deepstack))
    cache.put(names, on_device, [TOKENS] * 3)
    cache.put(
        names[:1],
        VisionFeatures(on_device.tokens[:TOKENS], (on_device.deepstack[0][:TOKENS],)),
        [TOKENS],
    )
    assert cache.missing(names) == [] and sum(bytes_of(cache)) == 3 * IMAGE_BYTES
    cache.pin(["c", "b"])
    assert cache.missing(names) == ["a"] and bytes_of(cache) == (2 * IMAGE_BYTES, 0)
    if device == "cpu":
        assert torch.equal(cache.get(["c"]).tokens, made.tokens[2 * TOKENS :])
    cache.clear()
    cache.put(
        ["d"],
        VisionFeatures(on_device.tokens[:TOKENS], (on_device.deepstack[0][:TOKENS],)),
        [TOKENS],
    )
    assert sum(bytes_of(cache)) == IMAGE_BYTES


def test_sizes_are_not_summed_anew_for_every_image(monkeypatch):
    """Asking 400 stacks for their sizes is linear in them, whoever holds them."""
    asked = []

    def counted(x):
        asked.append(1)
        return x.numel() * x.element_size()

    monkeypatch.setattr(torch.Tensor, "nbytes", property(counted))
    cache = VisionCache(2**30, "cpu")
    for i in range(400):
        cache.put([str(i)], features(i), [TOKENS])
    assert 400 <= len(asked) <= 2000


def test_features_carry_no_graph():
    cache = VisionCache(2**20, "cpu")
    grown = features(0)
    cache.put(["a"], VisionFeatures(grown.tokens.requires_grad_(), grown.deepstack), [TOKENS])
    assert not cache.get(["a"]).tokens.requires_grad
