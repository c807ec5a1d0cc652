"""Estimate the seconds in which an engine answers a step's prompts.

An engine decodes at most `slots` responses at once; a response that ends makes room for the next.
A step of decoding reads the weights that its tokens use and the keys and values of all responses,
or computes their products, whichever takes longer. Lengths are spread as their mean and their
longest say: a share (1 − t/longest)^a of responses is longer than t, where a = longest/mean − 1.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from heapq import heapify, heappop, heapreplace
from itertools import islice

import numpy as np

from rlinf_vl.models.shapes import Mixture
from rlinf_vl.preflight.rates import Rates

#: Responses above which lengths are simulated in bundles of equal ones.
MOST_SIMULATED = 1024


@dataclass(frozen=True, slots=True)
class Lengths:
    """Lengths of a step's trajectories, in tokens, as means where nothing else is said.

    Attributes:
        prompt: of a prompt, its images included; `images`: of its images alone.
        response: of a response; `longest`: of the longest one.
    """

    prompt: float
    images: float
    response: float
    longest: float

    def quantiles(self, n: int) -> np.ndarray:
        """Return the lengths of n responses, float64 [n], shortest first."""
        shares = (np.arange(n) + 0.5) / n
        power = max(self.longest / self.response - 1, 1e-6)
        return np.maximum(1.0, self.longest * (1 - (1 - shares) ** (1 / power)))


@dataclass(frozen=True, slots=True)
class EngineShape:
    """The sizes of a whole engine that decide what decoding reads and computes.

    Attributes:
        layers: number of layers; `hidden`: size of a hidden state; `itemsize`: bytes of a value.
        dense: parameters that every token uses; `experts`: those of all experts, of which a token
            uses a share.
        kv_token: bytes of keys and values of a token.
        tower: FLOPs of the vision tower for an image token.
        per_pair: FLOPs of attention of a prompt for a pair of tokens.
    """

    layers: int
    hidden: int
    itemsize: int
    dense: int
    experts: int
    mixture: Mixture | None
    kv_token: int
    tower: float = 0.0
    per_pair: float = 0.0

    @property
    def active(self) -> float:
        """The parameters that a token uses."""
        if self.mixture is None:
            return float(self.dense)
        return self.dense + self.experts * self.mixture.top_k / self.mixture.experts

    def weight_bytes(self, tokens: float) -> float:
        """Return the bytes of the weights that a step with so many tokens reads.

        Each token goes to `top_k` of the experts by chance.
        """
        touched = 0.0
        if self.mixture is not None:
            touched = 1 - (1 - self.mixture.top_k / self.mixture.experts) ** tokens
        return self.itemsize * (self.dense + touched * self.experts)


def step_seconds(shape: EngineShape, rates: Rates, gpus: int, rows: float, context: float) -> float:
    """Return the seconds of one step of decoding.

    Args:
        gpus: that share the engine's weights (`rollout.tensor_parallel_size`).
        rows: responses that are decoded; `context`: their mean length so far.
    """
    kv_bytes = rows * context * shape.kv_token
    memory = (shape.weight_bytes(rows) + kv_bytes) / (gpus * rates.decode_memory)
    products = 2 * shape.active * rows / (gpus * rates.decode_products)
    seconds = rates.decode_step_s + rows * rates.decode_row_s + shape.layers * rates.decode_layer_s
    # On a CPU the host does both; a GPU's bytes hide its products.
    seconds += max(memory, products) if rates.overlaps_host else memory + products
    if gpus > 1:  # two all-reduces of hidden states a layer
        state = rows * shape.hidden * shape.itemsize * 2 * (gpus - 1) / gpus
        seconds += 2 * shape.layers * (rates.collective_s / 2 + state / rates.node)
    return seconds


def prefill_seconds(
    shape: EngineShape, rates: Rates, gpus: int, prompts: float, lengths: Lengths
) -> float:
    """Return the seconds of so many prompts' forwards, images included.

    A group's prompt is computed once.
    """
    flops = 2 * shape.active * lengths.prompt + shape.per_pair * lengths.prompt**2 / 2
    return prompts * (flops + shape.tower * lengths.images) / (gpus * rates.prefill_products)


@cache
def generate_seconds(
    shape: EngineShape,
    rates: Rates,
    *,
    gpus: int,
    groups: float,
    group_size: int,
    slots: int,
    lengths: Lengths,
) -> float:
    """Return the seconds in which one engine generates its groups.

    `slots`: responses decoded at once.
    """
    n = max(1, round(groups * group_size))
    bundle = -(-n // MOST_SIMULATED)
    responses = lengths.quantiles(-(-n // bundle))
    # Long and short ones come in any order, the same each time.
    responses = np.random.default_rng(0).permutation(responses)
    decode = _decode_seconds(
        shape, rates, gpus, responses.tolist(), max(1, slots // bundle), bundle, lengths.prompt
    )
    host = groups * rates.group_s
    return prefill_seconds(shape, rates, gpus, groups, lengths) + decode + host


def _decode_seconds(
    shape: EngineShape,
    rates: Rates,
    gpus: int,
    responses: Sequence[float],
    slots: int,
    bundle: int,
    prompt: float,
) -> float:
    """Return the seconds of decoding responses of these lengths, in order, `slots` at once.

    Each stands for `bundle` equal ones.
    """
    starts_sum = seconds = token_step = 0.0
    pending = iter(responses)
    # Of running responses: the token steps at which they end, and started.
    running = [(length, 0.0) for length in islice(pending, slots)]
    heapify(running)
    following = next(pending, None)
    while running:
        (end, start), rows = running[0], len(running)
        if end > token_step:
            context = prompt + (token_step + end) / 2 - starts_sum / rows
            seconds += (end - token_step) * step_seconds(shape, rates, gpus, rows * bundle, context)
            token_step = end
        starts_sum -= start
        if following is None:
            heappop(running)
            continue
        heapreplace(running, (token_step + following, token_step))
        starts_sum += token_step
        following = next(pending, None)
    return seconds


def running_at_once(limit: int, kv_tokens: int, lengths: Lengths, group_size: int) -> int:
    """Return the responses that an engine decodes at once, by its own limit and its KV cache.

    A group's prompt is in the cache once.
    """
    tokens = lengths.prompt / group_size + (lengths.response + lengths.longest) / 2
    running = max(1, min(limit, math.floor(kv_tokens / tokens)))
    return running if running < 64 else running // 8 * 8
