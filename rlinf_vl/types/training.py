"""What the trainer computes on, and what that costs."""

from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True, slots=True)
class RowPart:
    """What one of the ranks that share a row has of it: which of the row's tokens, and which of the R sampled ones they predict,
    int64 [r]."""

    tokens: slice
    sampled: np.ndarray


@dataclass(frozen=True, slots=True, repr=False)
class MicroBatch:
    """One packed row for the trainer: S segments end to end, T tokens, R sampled tokens, N image tokens.

    Segments form trees, in depth-first order: a prompt that stands once is followed by the responses that continue it. With a
    `part`, what has a value for each token, image token or image is only that of the part's, and so are `predict` and `targets`.
    """

    ids: np.ndarray  # int64 [T]
    positions: np.ndarray  # int64 [4, T], rows (text, t, h, w); a segment goes on where the one it continues ends
    cu_seqlens: np.ndarray  # int64 [S + 1], segment boundaries 0 … T; padding, if any, is the last segment
    prefix: np.ndarray  # int64 [S], the segment that each continues, -1 for none
    copies: np.ndarray  # int64 [S], sequences that each stands for; 0 for padding
    routes: np.ndarray | None  # [T, L·k], of `TokenSequence.routes`; None if no sequence has them
    predict: np.ndarray  # int64 [R], row positions whose hidden state predicts a sampled token
    targets: np.ndarray  # int64 [R], those tokens
    trajectories: np.ndarray  # int64 [R], which trajectory of the micro-batch each belongs to, 0, 1, …
    turns: (
        np.ndarray
    )  # int64 [R], which turn of the micro-batch each was sampled in; those of a trajectory follow each other
    advantages: np.ndarray  # float32 [R]
    rollout_logprobs: np.ndarray | None  # float32 [R], None if the engine returned none
    versions: np.ndarray  # int32 [R], version of the weights that sampled each
    columns: dict[str, np.ndarray]  # [R] each, of `TokenSequence.columns`; a row without trajectories has none
    images: tuple[str, ...]  # hashes of the distinct images
    pixel_values: np.ndarray | None  # float32 [P, d], their patches; None without images, or if features replace them
    grids: np.ndarray  # int64 [n, 3], (t, h, w) of those images
    image_positions: np.ndarray  # int64 [N], row positions of image placeholders
    image_features: np.ndarray  # int64 [N], which row of the images' features stands at each
    #: bool [R], sampled on a corrupted image: rollout_logprobs are of that; None: none was
    corrupted: np.ndarray | None = None
    part: RowPart | None = None  # None: all of the row
    run_vision: bool = False  # run the tower, on a blank patch without images: another rank does in this micro-step

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
    """What training costs, in units of one token's linear part in all layers of the language model.

    `attention` is the price of a (query, key) pair, `head` of a token that carries loss, `patch` of a vision patch. The
    defaults are those of Qwen3-VL-2B with a frozen tower: a token's linear part is
    28 × 2048 × (128 × 2 × (16 + 8) + 3 × 6144) = 1.41e9 multiply-adds, a pair 2 × 16 × 128 × 28 = 1.15e5,
    the head 151936 × 2048 = 3.1e8, and a patch's forward 3.3e8, a third of what it would be with its backward.
    """

    attention: float = 8.1e-5
    head: float = 0.22
    patch: float = 0.077
