"""Rewards minus their group's mean, scaled up for the groups that teach nothing (GPG).

    α·(r − mean of the group), α = trajectories / trajectories of groups that do not tie

Groups whose rewards all tie get exactly 0, and would make the step smaller by their share. The
paper's loss has no ratio: it is `loss_type: cross_entropy`.

Chu et al., GPG, [2504.02546](https://arxiv.org/abs/2504.02546), § 3
"""

from rlinf_vl.algorithms.advantages import group_advantages, listed

DEFAULTS = {"normalize_advantages": False}
NEEDS_GROUPS = True


def advantages(rewards, group_ids, tokens, *, normalize):
    values = group_advantages(rewards, group_ids, normalize=normalize)
    # In a group that does not tie, a reward may still equal the mean.
    spread = group_advantages(rewards, group_ids, normalize=False).abs().double()
    groups = listed("group_ids", group_ids, rewards)
    differ = {group for group, value in zip(groups, spread.tolist(), strict=True) if value > 0}
    n_taught = sum(group in differ for group in groups)
    return values * (len(groups) / max(1, n_taught))
