"""What an engine is asked, and what it answers."""

from dataclasses import dataclass, field

import numpy as np

from rlinf_vl.types.problem import ImageRef


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """How one response is sampled. `temperature` 0 is greedy; `top_k` 0 and `top_p` 1 keep the whole distribution."""

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    max_new_tokens: int = 128
    stop_ids: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class Request:
    """One prompt for an engine: `len(seeds)` samples are drawn, sample i from its own stream `seeds[i]`."""

    ids: np.ndarray = field(repr=False)  # int32 [P], image placeholders expanded
    images: tuple[ImageRef, ...] = field(repr=False)  # in order of their placeholders
    image_grids: np.ndarray = field(repr=False)  # int32 [n, 3], (t, h, w) of each image in patches
    sampling: SamplingParams
    seeds: tuple[int, ...]
    #: One name per seed, or none: the engine may keep what it computed for sample i under `sessions[i]`. The next request of a
    #: session has this one seed, and begins with all ids and images so far, or some where the history was rewritten. Nothing but
    #: speed depends on it.
    sessions: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Sample:
    """One sampled continuation: ids int32 [R], logprobs float32 [R], versions int32 [R] and columns, see `TokenSequence`."""

    ids: np.ndarray = field(repr=False)
    logprobs: np.ndarray = field(repr=False)
    versions: np.ndarray = field(repr=False)
    finish_reason: str
    columns: dict[str, np.ndarray] = field(default_factory=dict, repr=False)
    #: [P + R, L·k], of prompt and sample; see `TokenSequence`.
    routes: np.ndarray | None = field(default=None, repr=False)


@dataclass(frozen=True, slots=True)
class Completion:
    """What an engine answers to one `Request`: one `Sample` per seed, in order."""

    samples: tuple[Sample, ...]
