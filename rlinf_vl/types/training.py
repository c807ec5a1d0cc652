"""The input of the trainer, a packed row, and the prices of training it."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeAlias

import numpy as np

#: The advantages of a trajectory: of each turn a number, or those of its sampled tokens, float32.
TurnAdvantages: TypeAlias = Sequence[float | np.ndarray]


@dataclass(frozen=True, slots=True)
class RowPart:
    """The part of a row that one of several ranks computes."""

    tokens: slice  # the part's tokens, in row positions
    sampled: np.ndarray  # int64 [r], which of the row's R sampled tokens they predict


@dataclass(frozen=True, slots=True, repr=False)
class MicroBatch:
    """One packed row for the trainer: S segments; T tokens, of which R are sampled, N of images.

    Segments form trees in depth-first order: a shared prompt is followed by the responses that
    continue it. With a `part`, the arrays over tokens, image tokens and images, `predict` and
    `targets` hold the part's values only; all others are those of the whole row.
    """

    ids: np.ndarray  # int64 [T]
    positions: np.ndarray  # int64 [4, T], (text, t, h, w); a segment continues its prefix
    cu_seqlens: np.ndarray  # int64 [S + 1], segment bounds 0 … T; the last may be padding
    prefix: np.ndarray  # int64 [S], the segment that it continues, -1 for none
    copies: np.ndarray  # int64 [S], the number of sequences that share it; 0 for padding
    row_columns: dict[str, np.ndarray]  # [T, …], `TokenSequence.columns` of all tokens: for models
    predict: np.ndarray  # int64 [R], row positions whose hidden state predicts a sampled token
    targets: np.ndarray  # int64 [R], the sampled tokens
    trajectories: np.ndarray  # int64 [R], the trajectory of the sampled token, 0, 1, … in the row
    #: int64 [R], the turn in which the token was sampled, numbered over the whole row; the turns of
    #: one trajectory are consecutive.
    turns: np.ndarray
    advantages: np.ndarray  # float32 [R]
    rollout_logprobs: np.ndarray | None  # float32 [R], None if the engine returned none
    versions: np.ndarray  # int32 [R], version of the weights that sampled the token
    columns: dict[str, np.ndarray]  # [R, …], the same of the sampled tokens: for losses
    images: tuple[str, ...]  # hashes of the distinct images
    #: float32 [P, d], the patches of the images; None without images, or if features replace them.
    pixel_values: np.ndarray | None
    grids: np.ndarray  # int64 [n, 3], (t, h, w) of those images
    image_positions: np.ndarray  # int64 [N], row positions of image placeholders
    image_features: np.ndarray  # int64 [N], index of the image feature at each placeholder
    #: int64 [n, 2], runs of image placeholders in the whole row: the first, and the token behind
    #: the last. In some models the tokens of a run see each other.
    image_runs: np.ndarray
    #: bool [R], whether the token was sampled on a corrupted image; its rollout logprob is then of
    #: that image. None if no token was.
    corrupted: np.ndarray | None = None
    part: RowPart | None = None  # None for the whole row
    #: Whether to run the vision tower, on a blank patch if the row has no images: another rank runs
    #: it in this micro-step, and the ranks' collectives must match.
    run_vision: bool = False

    def __post_init__(self) -> None:
        assert self.positions.shape == (4, len(self.ids))
        assert len(self.prefix) == len(self.copies) == len(self.cu_seqlens) - 1
        sampled = self.trajectories if self.part is None else self.part.sampled
        assert len(self.predict) == len(self.targets) == len(sampled)
        assert len(self.trajectories) == len(self.turns) == len(self.advantages)
        assert len(self.image_positions) == len(self.image_features)
        assert self.run_vision or self.pixel_values is None


@dataclass(frozen=True, slots=True)
class Prices:
    """The prices of training, relative to one token's linear layers in the whole language model.

    The defaults are those of Qwen3-VL-2B with a frozen tower. In multiply-adds, the linear layers
    of a token take 28 × 2048 × (128 × 2 × (16 + 8) + 3 × 6144) = 1.41e9, a pair of query and key
    2 × 16 × 128 × 28 = 1.15e5, and the head 151936 × 2048 = 3.1e8. The forward of a patch takes
    3.3e8; it counts a third, since a frozen tower has no backward.
    """

    attention: float = 8.1e-5  # per pair of query and key
    head: float = 0.22  # per token that carries loss
    patch: float = 0.077  # per vision patch
