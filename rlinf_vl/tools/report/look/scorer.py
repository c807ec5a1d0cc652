"""Log-probabilities of recorded answers, by the trainer's forward, with any images in place of
theirs."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import NamedTuple

import numpy as np
import torch
from PIL import Image

from rlinf_vl.data.images import decode, encode_png, image_size
from rlinf_vl.models.policy import Candidates, PolicyModel
from rlinf_vl.packing.collator import Collator, Member
from rlinf_vl.tools.report.look.occlusion import Cell, HeatMap, heat_map
from rlinf_vl.types import Group, ImageRef, MicroBatch, Trajectory

#: Number of tokens by which two distributions of the next token are compared.
N_LIKELIEST = 16
#: Least probability in a divergence: that of all tokens but the likeliest can round to below 0.
SMALLEST_SHARE = 1e-9


class Scorer:
    """Scores trajectories in batches of at most `max_tokens` tokens (one trajectory at least)."""

    def __init__(self, policy: PolicyModel, collate: Collator, max_tokens: int) -> None:
        self._policy = policy.eval()
        self._collate = replace(collate, share_prompts=False)
        self._max_tokens = max_tokens

    @torch.no_grad()
    def logprobs(self, trajectories: Sequence[Trajectory]) -> list[np.ndarray]:
        """Return float32 [sampled tokens] of each trajectory."""
        results: list[np.ndarray] = []
        for batch in self._batches(trajectories):
            rows = self._rows(batch)
            logprobs = self._policy(rows)[0].float().cpu().numpy()
            results += [logprobs[rows.trajectories == k] for k in range(len(batch))]
        return results

    @torch.no_grad()
    def _likeliest(self, trajectory: Trajectory) -> "LikeliestTokens":
        """Return the likeliest tokens at each sampled token of a trajectory."""
        candidates = Candidates(N_LIKELIEST)
        logprobs, _ = self._policy(self._rows([trajectory]), candidates=candidates)
        assert candidates.ids is not None
        return LikeliestTokens(candidates.ids, logprobs[:, 1:].double().cpu().numpy())

    @torch.no_grad()
    def _divergences(
        self, likeliest: "LikeliestTokens", variants: Sequence[Trajectory]
    ) -> list[float]:
        """Return the divergence from a trajectory of each of its variants with other images."""
        results: list[float] = []
        for batch in self._batches(variants):
            rows = self._rows(batch)
            numbers = torch.from_numpy(rows.trajectories).to(likeliest.ids.device)
            ids = likeliest.ids.new_empty(len(numbers), likeliest.ids.shape[1])
            for k in range(len(batch)):
                ids[numbers == k] = likeliest.ids
            logprobs, _ = self._policy(rows, candidates=Candidates(N_LIKELIEST, ids))
            logprobs = logprobs[:, 1:].double().cpu().numpy()
            for k in range(len(batch)):
                results.append(divergence(likeliest.logprobs, logprobs[rows.trajectories == k]))
        return results

    def _rows(self, batch: Sequence[Trajectory]) -> MicroBatch:
        members = []
        for number, trajectory in enumerate(batch):
            group = Group(f"look-{number}", "", 0, (trajectory,))
            members.append(Member(group, 0, (0.0,) * len(trajectory.turns)))
        return self._collate(members, run_vision=True)

    def _batches(self, trajectories: Sequence[Trajectory]) -> list[list[Trajectory]]:
        batches: list[list[Trajectory]] = []
        room = 0
        for trajectory in trajectories:
            tokens = sum(len(sequence.ids) for sequence in trajectory.sequences)
            if tokens > room or not batches:
                batches.append([])
                room = self._max_tokens
            batches[-1].append(trajectory)
            room -= tokens
        return batches

    def heat_map(
        self, trajectory: Trajectory, image: ImageRef, shape: tuple[int, int], budget: int
    ) -> HeatMap:
        """Map which patches of an image the trajectory's answers depend on.

        Args:
            shape: rows and columns of the image's patches.
            budget: the most forwards, as in `heat_map`.
        """
        likeliest = self._likeliest(trajectory)
        pixels = np.asarray(decode(image))
        height, width = image_size(image)
        colours = ground_colours(pixels)

        def hidden(cell: Cell, colour: np.ndarray) -> Trajectory:
            top, bottom = (round(n * height / shape[0]) for n in (cell.top, cell.bottom))
            left, right = (round(n * width / shape[1]) for n in (cell.left, cell.right))
            changed = pixels.copy()
            changed[top:bottom, left:right] = colour
            replacement = ImageRef.of(encode_png(Image.fromarray(changed)))
            return with_images(trajectory, {image.hash: replacement})

        def drops(cells: Sequence[Cell]) -> list[float]:
            variants = [hidden(cell, colour) for colour in colours for cell in cells]
            divergences = self._divergences(likeliest, variants)
            return np.reshape(divergences, (len(colours), len(cells))).max(axis=0).tolist()

        by_cells = heat_map(shape, drops, budget // len(colours))
        return replace(by_cells, forwards=by_cells.forwards * len(colours))


class LikeliestTokens(NamedTuple):
    """The likeliest tokens at each sampled token: ids, int64 [R, K], and logprobs, [R, K]."""

    ids: torch.Tensor
    logprobs: np.ndarray


def divergence(logprobs: np.ndarray, other_logprobs: np.ndarray) -> float:
    """Return the KL divergence, summed over tokens, from logprobs of K tokens under two policies.

    All other tokens count as one, so it is at most the divergence of the whole distributions.

    Args:
        logprobs: [R, K], of the policy that the mean is over.
        other_logprobs: [R, K], of the same tokens.
    """
    p, q = (
        np.column_stack([np.exp(values), 1 - np.exp(values).sum(axis=1)]).clip(SMALLEST_SHARE)
        for values in (logprobs, other_logprobs)
    )
    return float((p * np.log(p / q)).sum())


def ground_colours(pixels: np.ndarray) -> list[np.ndarray]:
    """Return the commonest colour of a picture, and that of its edge where it is another one.

    Either may be the ground that an object stands on: an object can fill most of the picture, and
    what matters can be a frame around it.
    """
    height, width = pixels.shape[:2]
    band = max(1, round(min(height, width) / 12))
    is_edge = np.ones((height, width), bool)
    is_edge[band : height - band, band : width - band] = False
    colours = [_commonest_colour(pixels.reshape(-1, 3)), _commonest_colour(pixels[is_edge])]
    return colours[: 1 if np.array_equal(colours[0] // 16, colours[1] // 16) else 2]


def _commonest_colour(pixels: np.ndarray) -> np.ndarray:
    """Return the mean of the fullest of 4,096 bins of colours, uint8 [3]."""
    bins = (pixels // 16).astype(np.int64) @ np.array([256, 16, 1])
    return pixels[bins == np.bincount(bins).argmax()].mean(axis=0).astype(np.uint8)


def with_images(trajectory: Trajectory, images: Mapping[str, ImageRef]) -> Trajectory:
    """Return the trajectory with each image replaced by the one under its hash, if there is one."""
    sequences = []
    for sequence in trajectory.sequences:
        pairs = tuple((images.get(ref.hash, ref), grid) for ref, grid in sequence.images)
        sequences.append(replace(sequence, images=pairs))
    return replace(trajectory, sequences=tuple(sequences))
