"""Requests to a generation engine, and its replies."""

from dataclasses import dataclass, field

import numpy as np

from rlinf_vl.types.problem import ImageRef


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """The sampling settings of one response.

    `temperature` 0 is greedy decoding; `top_k` 0 and `top_p` 1 keep the whole distribution.
    """

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    max_new_tokens: int = 128
    stop_ids: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class Request:
    """One prompt for an engine, which draws one sample from each random stream of `seeds`."""

    ids: np.ndarray = field(repr=False)  # int32 [P], image placeholders expanded
    images: tuple[ImageRef, ...] = field(repr=False)  # in order of their placeholders
    image_grids: np.ndarray = field(repr=False)  # int32 [n, 3], (t, h, w) of each image in patches
    sampling: SamplingParams
    seeds: tuple[int, ...]
    #: One name per seed, or none. The engine may cache its computation for sample i under
    #: `sessions[i]`. The next request of a session has a single seed and begins with all ids and
    #: images so far, or with fewer if the history was rewritten. Only speed depends on sessions.
    sessions: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Sample:
    """One sampled continuation of R tokens after a prompt of P (arrays: see `TokenSequence`)."""

    ids: np.ndarray = field(repr=False)  # int32 [R]
    logprobs: np.ndarray = field(repr=False)  # float32 [R]
    versions: np.ndarray = field(repr=False)  # int32 [R]
    finish_reason: str
    #: [R] or [R, …]; or [P + R, …], if the engine reports them for the prompt, too.
    columns: dict[str, np.ndarray] = field(default_factory=dict, repr=False)


@dataclass(frozen=True, slots=True)
class Completion:
    """The reply of an engine to one `Request`: one `Sample` per seed, in the order of the seeds."""

    samples: tuple[Sample, ...]
