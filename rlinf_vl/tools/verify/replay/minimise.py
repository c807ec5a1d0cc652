"""Shrinks a recorded step to the least that still shows the same first difference: by halves over
trajectories (delta debugging; Zeller & Hildebrandt 2002), then the images, then the answers' ends.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any, TypeVar

import numpy as np

from rlinf_vl.models.image_tokens import ImageTokens
from rlinf_vl.observe.replay_file import RecordedStep, TrajectoryNumber
from rlinf_vl.tools.verify.replay.quantities import Quantity
from rlinf_vl.types import TokenSequence, Trajectory

T = TypeVar("T")
#: Replays that a minimisation makes at most.
MAX_REPLAYS = 40
#: Says in which quantity a step's replay differs first; None: in none.
FirstDifference = Callable[[RecordedStep], Quantity | None]


class Minimiser:
    """Shrinks steps as long as their replay differs first in the same quantity.

    Attributes:
        replays: replays made so far.
    """

    def __init__(self, first_difference: FirstDifference, image_tokens: ImageTokens) -> None:
        self._first_difference = first_difference
        self._image_tokens = image_tokens
        self.replays = 0

    def __call__(self, step: RecordedStep) -> RecordedStep:
        """Return the smallest step found; the step itself if nothing differs in it."""
        shown_quantity = self._first_difference(step)
        if shown_quantity is None:
            return step

        def shows(smaller: RecordedStep) -> bool:
            if self.replays >= MAX_REPLAYS:
                return False
            self.replays += 1
            try:
                return self._first_difference(smaller) == shown_quantity
            except AssertionError:  # no longer a step, such as an image without its placeholders
                return False

        numbers = [number for mini in step.minibatches for number in mini.trajectories]
        fewest = _minimised(numbers, lambda chosen: shows(part_of_step(step, chosen)))
        if len(fewest) < len(numbers):
            step = part_of_step(step, fewest)
        step = self._without_images(step, shows)
        return self._shorter(step, shows)

    def _without_images(
        self, step: RecordedStep, shows: Callable[[RecordedStep], bool]
    ) -> RecordedStep:
        """Drop images one by one, with their placeholders."""
        for g in range(len(step.groups)):
            # From the last one on, so that the numbers of the others stay.
            for number in reversed(range(len(step.groups[g].sequences[0].images))):
                smaller = self._without_image(step, g, number)
                if smaller is not None and shows(smaller):
                    step = smaller
        return step

    def _without_image(self, step: RecordedStep, g: int, number: int) -> RecordedStep | None:
        """Return the step without an image of a group; None if it stands behind the prompt."""
        group = step.groups[g]
        sequence = group.sequences[0]
        grids = np.array([grid for _, grid in sequence.images], np.int64).reshape(-1, 3)
        ends = np.cumsum(self._image_tokens(grids))
        first = 0 if number == 0 else int(ends[number - 1])
        placeholders = np.flatnonzero(self._image_tokens.mask(sequence.ids))
        positions = placeholders[first : int(ends[number])]
        if not len(positions) or positions[-1] >= group.prefix_length:
            return None
        trajectories = []
        for trajectory in group.trajectories:
            sequences = tuple(_without(s, positions, number) for s in trajectory.sequences)
            turns = tuple(
                replace(t, start=t.start - len(positions), end=t.end - len(positions))
                for t in trajectory.turns
            )
            trajectories.append(replace(trajectory, sequences=sequences, turns=turns))
        smaller = replace(
            group,
            prefix_length=group.prefix_length - len(positions),
            trajectories=tuple(trajectories),
        )
        groups = (*step.groups[:g], smaller, *step.groups[g + 1 :])
        # Its messages show the image still.
        messages = {n: m for n, m in step.messages.items() if n != g}
        return replace(step, groups=groups, messages=messages, is_whole=False, metrics={})

    def _shorter(self, step: RecordedStep, shows: Callable[[RecordedStep], bool]) -> RecordedStep:
        """Cut the answers' ends: to one token, else by halves as long as that shows it."""
        longest = max(
            (int(s.loss_mask.sum()) for group in step.groups for s in group.sequences), default=0
        )
        low, high = 0, longest  # `high` shows it
        while high - low > 1:
            middle = 1 if low == 0 else (low + high) // 2
            smaller = cut(step, middle)
            if shows(smaller):
                high = middle
            else:
                low = middle
        return step if high == longest else cut(step, high)


def _minimised(items: list[T], shows: Callable[[list[T]], bool]) -> list[T]:
    """Return a smallest list of the items for which `shows` holds: no half, quarter … of it can be
    left out."""
    size = len(items)
    while size > 1:
        size = -(-size // 2)
        for part in _parts(items, size):
            if shows(part):
                items, size = part, min(size, len(part))
                break
        else:
            for part in _parts(items, size):
                remaining_items = [item for item in items if item not in part]
                if remaining_items and len(remaining_items) > size and shows(remaining_items):
                    items = remaining_items
                    size = 2 * size
                    break
    return items


def _parts(items: list[T], size: int) -> Iterator[list[T]]:
    for start in range(0, len(items), size):
        part = items[start : start + size]
        if len(part) < len(items):
            yield part


def _without(sequence: TokenSequence, positions: np.ndarray, number: int) -> TokenSequence:
    """Return a sequence without these tokens and one of its images."""
    other_tokens = np.setdiff1d(np.arange(len(sequence.ids)), positions)
    columns = {name: column[other_tokens] for name, column in sequence.columns.items()}
    return replace(
        sequence,
        ids=sequence.ids[other_tokens],
        loss_mask=sequence.loss_mask[other_tokens],
        logprobs=None if sequence.logprobs is None else sequence.logprobs[other_tokens],
        versions=sequence.versions[other_tokens],
        images=(*sequence.images[:number], *sequence.images[number + 1 :]),
        columns=columns,
    )


def cut(step: RecordedStep, longest: int) -> RecordedStep:
    """Return the step with each sequence cut behind `longest` sampled tokens."""
    groups, train_logprobs = [], dict(step.train_logprobs)
    for g, group in enumerate(step.groups):
        trajectories = []
        for i, trajectory in enumerate(group.trajectories):
            shorter = _cut_trajectory(trajectory, longest)
            n = sum(int(s.loss_mask.sum()) for s in shorter.sequences)
            number: TrajectoryNumber = (g, i)
            if number in train_logprobs:
                if len(shorter.sequences) == 1:
                    train_logprobs[number] = train_logprobs[number][:n]
                else:
                    del train_logprobs[number]
            trajectories.append(shorter)
        groups.append(replace(group, trajectories=tuple(trajectories)))
    return replace(
        step, groups=tuple(groups), train_logprobs=train_logprobs, is_whole=False, metrics={}
    )


def _cut_trajectory(trajectory: Trajectory, longest: int) -> Trajectory:
    sequences, ends = [], []
    for sequence in trajectory.sequences:
        sampled = np.flatnonzero(sequence.loss_mask)
        end = int(sampled[longest - 1]) + 1 if len(sampled) > longest else len(sequence.ids)
        columns = {name: column[:end] for name, column in sequence.columns.items()}
        sequences.append(
            replace(
                sequence,
                ids=sequence.ids[:end],
                loss_mask=sequence.loss_mask[:end],
                logprobs=None if sequence.logprobs is None else sequence.logprobs[:end],
                versions=sequence.versions[:end],
                columns=columns,
            )
        )
        ends.append(end)
    turns = tuple(
        replace(t, start=min(t.start, ends[t.sequence]), end=min(t.end, ends[t.sequence]))
        for t in trajectory.turns
    )
    return replace(trajectory, sequences=tuple(sequences), turns=turns)


def part_of_step(step: RecordedStep, kept_numbers: Sequence[TrajectoryNumber]) -> RecordedStep:
    """Return the step with these trajectories alone, the groups renumbered.

    The loss's denominators stay, and the run's metrics go, which are those of all trajectories.
    """
    kept_groups = sorted({g for g, _ in kept_numbers})
    new_group = {g: n for n, g in enumerate(kept_groups)}
    indices: dict[int, list[int]] = {g: [] for g in kept_groups}
    for g, i in sorted(kept_numbers):
        indices[g].append(i)
    numbers = {(g, i): (new_group[g], n) for g in kept_groups for n, i in enumerate(indices[g])}
    groups = tuple(
        replace(
            step.groups[g],
            trajectories=tuple(step.groups[g].trajectories[i] for i in indices[g]),
        )
        for g in kept_groups
    )
    minibatches = []
    for mini in step.minibatches:
        micro_batches = [
            tuple(numbers[item] for item in micro_batch if item in numbers)
            for micro_batch in mini.micro_batches
        ]
        micro_batches = [items for items in micro_batches if items]
        if micro_batches:
            minibatches.append(replace(mini, micro_batches=tuple(micro_batches)))
    changes: dict[str, Any] = {
        "advantages": tuple(tuple(step.advantages[g][i] for i in indices[g]) for g in kept_groups),
        "train_logprobs": {
            numbers[item]: x for item, x in step.train_logprobs.items() if item in numbers
        },
        "messages": {
            new_group[g]: messages for g, messages in step.messages.items() if g in new_group
        },
    }
    sizes = step.group_sizes or tuple(len(group.trajectories) for group in step.groups)
    changes["group_sizes"] = tuple(sizes[g] for g in kept_groups)
    is_whole = step.is_whole and len(numbers) == sum(len(g.trajectories) for g in step.groups)
    return replace(
        step,
        groups=groups,
        minibatches=tuple(minibatches),
        metrics=step.metrics if is_whole else {},
        is_whole=is_whole,
        **changes,
    )
