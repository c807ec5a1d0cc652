"""Groups as a teacher with a prompt of its own sees them: that prompt, and the same answers."""

from dataclasses import replace

import numpy as np

from rlinf_vl.types import Group, TokenIds, TokenSequence, Trajectory, shared_prefix


def as_teacher_sees(group: Group, placeholder_ids: TokenIds) -> Group:
    """Return the group with each trajectory's `teacher_prompt` in place of its prompt.

    The sampled tokens and the images are the same, in the same order. Columns that the engine
    reported are left out: they are about the policy's prompt.
    """
    trajectories = tuple(
        _with_prompt(trajectory) if trajectory.sequences else trajectory
        for trajectory in group.trajectories
    )
    prefix_length = shared_prefix(trajectories, placeholder_ids)
    return replace(group, trajectories=trajectories, prefix_length=prefix_length)


def _with_prompt(trajectory: Trajectory) -> Trajectory:
    """Return a trajectory of one turn with the teacher's prompt."""
    assert trajectory.teacher_prompt, "the rollout worker rendered no prompt for the teacher"
    (sequence,), (turn,) = trajectory.sequences, trajectory.turns
    prompt, answer = np.array(trajectory.teacher_prompt, np.int32), slice(turn.start, None)
    n = len(prompt)
    logprobs = sequence.logprobs
    if logprobs is not None:
        logprobs = np.concatenate([np.zeros(n, np.float32), logprobs[answer]])
    taught = TokenSequence(
        ids=np.concatenate([prompt, sequence.ids[answer]]),
        loss_mask=np.concatenate([np.zeros(n, bool), sequence.loss_mask[answer]]),
        logprobs=logprobs,
        versions=np.concatenate([np.full(n, -1, np.int32), sequence.versions[answer]]),
        images=sequence.images,
    )
    taught_turn = replace(turn, start=n, end=n + turn.end - turn.start)
    return replace(trajectory, sequences=(taught,), turns=(taught_turn,))
