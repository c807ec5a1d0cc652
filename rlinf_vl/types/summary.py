"""The figures of groups that the controller gets, without tokens and pixels."""

import math
from dataclasses import dataclass, field

import numpy as np

from rlinf_vl.types.group import Group
from rlinf_vl.types.problem import UNGRADABLE, TokenIds
from rlinf_vl.types.trajectory import Trajectory, distinct_tokens


@dataclass(frozen=True, slots=True)
class TrajectorySummary:
    """The figures of one trajectory; those without a comment are as in `Trajectory`."""

    tokens: int  # prompt included; tokens that its sequences share count once
    response_tokens: int  # sampled tokens; one in several sequences counts for each
    reward: float
    correct: bool = False
    status: str = "stop"
    error: str | None = None
    turns: int = 1  # number of answers
    metrics: dict[str, float] = field(default_factory=dict)
    reward_parts: dict[str, float] = field(default_factory=dict)  # without `UNGRADABLE`
    turn_rewards: tuple[float, ...] = ()
    turn_tokens: tuple[int, ...] = ()
    turn_states: tuple[str, ...] = ()
    turn_versions: tuple[int, ...] = ()
    turn_thoughts: tuple[tuple[int, int, int], ...] = ()
    cuts: int = 0
    corrupted: bool = False
    ungradable: bool = False  # whether a reward function could not grade its response
    ungraded: str = ""
    penalized: str = ""
    scores: tuple[float | None, ...] = ()
    base_reward: float = 0.0
    token_rewards: tuple[tuple[int, int, float], ...] = ()

    @classmethod
    def of(
        cls, trajectory: Trajectory, prefix_length: int, placeholder_ids: TokenIds
    ) -> "TrajectorySummary":
        """Summarize a trajectory of a group whose sequences share `prefix_length` tokens."""
        reward_parts = dict(trajectory.reward_parts)
        ungradable = reward_parts.pop(UNGRADABLE, None) is not None
        return cls(
            tokens=distinct_tokens(trajectory.sequences, placeholder_ids) or prefix_length,
            response_tokens=trajectory.n_response_tokens,
            reward=float(trajectory.reward),
            correct=bool(trajectory.correct),
            status=trajectory.status,
            error=trajectory.error,
            turns=len(trajectory.turns),
            metrics=trajectory.metrics,
            reward_parts=reward_parts,
            turn_rewards=trajectory.turn_rewards,
            turn_tokens=trajectory.turn_tokens,
            turn_states=trajectory.turn_states,
            turn_versions=trajectory.turn_versions,
            turn_thoughts=trajectory.turn_thoughts,
            cuts=trajectory.cuts,
            corrupted=trajectory.corrupted,
            ungradable=ungradable,
            ungraded=trajectory.ungraded,
            penalized=trajectory.penalized,
            scores=trajectory.scores,
            base_reward=trajectory.base_reward,
            token_rewards=trajectory.token_rewards,
        )


@dataclass(frozen=True, slots=True)
class GroupSummary:
    """The figures of a group, with those of each of its trajectories."""

    id: str
    problem_id: str
    prompt_tokens: int  # length of the prefix that all trajectories share
    trajectories: tuple[TrajectorySummary, ...]
    min_version: int
    max_version: int
    images: int  # distinct images of all trajectories
    patches: int  # patches of those images
    #: Encoded bytes of each image by hash, including those that corrupted trajectories saw.
    image_bytes: dict[str, int]
    array_bytes: int = 0
    #: Bytes in the object store: of the group, and of each image that no earlier group had stored.
    object_bytes: int = 0
    #: Seconds in which the engine had work, and all seconds, since the worker's last group.
    engine_seconds: tuple[float, float] = (0.0, 0.0)
    prefilled_tokens: int = 0  # by the worker's engine, since the worker's last group
    hung_calls: int = 0  # environment calls hanging in the worker when the group was finished
    #: Under a vision control, images that its trajectories saw beside the row's replaced ones.
    env_images: int = 0
    #: Number of sampled tokens by the version of the weights that sampled them.
    version_tokens: dict[int, int] = field(default_factory=dict)
    labels: dict[str, str | float] = field(default_factory=dict)  # `Problem.labels`

    @property
    def valid(self) -> list[TrajectorySummary]:
        """The trajectories without an error."""
        return [trajectory for trajectory in self.trajectories if trajectory.error is None]

    @classmethod
    def of(cls, group: Group, placeholder_ids: TokenIds, object_bytes: int = 0) -> "GroupSummary":
        """Summarize a group; `placeholder_ids` are the ids of image placeholders."""
        versions = np.concatenate(
            [np.zeros(0, np.int32), *(s.versions[s.loss_mask] for s in group.sequences)]
        )
        distinct_versions, version_counts = np.unique(versions, return_counts=True)
        images = group.images
        all_images = [image for image, _ in images] + list(group.corrupted_images.values())
        return cls(
            id=group.id,
            problem_id=group.problem_id,
            prompt_tokens=group.prefix_length,
            trajectories=tuple(
                TrajectorySummary.of(trajectory, group.prefix_length, placeholder_ids)
                for trajectory in group.trajectories
            ),
            min_version=int(versions.min()) if versions.size else -1,
            max_version=int(versions.max()) if versions.size else -1,
            version_tokens=dict(
                zip(distinct_versions.tolist(), version_counts.tolist(), strict=True)
            ),
            images=len(images),
            patches=sum(math.prod(grid) for _, grid in images),
            image_bytes={image.hash: len(image.data) for image in all_images},
            array_bytes=group.array_bytes,
            object_bytes=object_bytes,
            labels=group.labels,
        )
