"""Log-probabilities of recorded answers, by the trainer's forward, with any images in place of
theirs."""

from collections.abc import Mapping, Sequence
from dataclasses import replace

import numpy as np
import torch
from PIL import Image

from rlinf_vl.data.images import decode, encode_png, image_size
from rlinf_vl.look.occlusion import Cell, HeatMap, heat_map
from rlinf_vl.models.policy import PolicyModel
from rlinf_vl.packing.collator import Collator, Member
from rlinf_vl.types import Group, ImageRef, Trajectory


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
            members = []
            for number, trajectory in enumerate(batch):
                group = Group(f"look-{number}", "", 0, (trajectory,))
                members.append(Member(group, 0, (0.0,) * len(trajectory.turns)))
            rows = self._collate(members, run_vision=True)
            logprobs = self._policy(rows)[0].float().cpu().numpy()
            results += [logprobs[rows.trajectories == k] for k in range(len(batch))]
        return results

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

        A hidden cell has the image's median colour, so that hiding empty ground changes little.

        Args:
            shape: rows and columns of the image's patches.
            budget: as in `heat_map`.
        """
        full_score = float(self.logprobs([trajectory])[0].sum())
        pixels = np.asarray(decode(image))
        height, width = image_size(image)
        colour = np.median(pixels.reshape(-1, 3), axis=0).astype(np.uint8)

        def hidden(cell: Cell) -> Trajectory:
            top, bottom = (round(n * height / shape[0]) for n in (cell.top, cell.bottom))
            left, right = (round(n * width / shape[1]) for n in (cell.left, cell.right))
            changed = pixels.copy()
            changed[top:bottom, left:right] = colour
            replacement = ImageRef.of(encode_png(Image.fromarray(changed)))
            return with_images(trajectory, {image.hash: replacement})

        def drops(cells: Sequence[Cell]) -> list[float]:
            scores = self.logprobs([hidden(cell) for cell in cells])
            return [full_score - float(score.sum()) for score in scores]

        return heat_map(shape, drops, budget)


def with_images(trajectory: Trajectory, images: Mapping[str, ImageRef]) -> Trajectory:
    """Return the trajectory with each image replaced by the one under its hash, if there is one."""
    sequences = []
    for sequence in trajectory.sequences:
        pairs = tuple((images.get(ref.hash, ref), grid) for ref, grid in sequence.images)
        sequences.append(replace(sequence, images=pairs))
    return replace(trajectory, sequences=tuple(sequences))
