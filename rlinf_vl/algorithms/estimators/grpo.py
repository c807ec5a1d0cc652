"""Rewards minus their group's mean, over the group's standard deviation.

    (r − mean) / (std + 1e-6), of the group, std with G − 1

A group whose rewards all tie gets exactly 0.

Shao et al., DeepSeekMath, [2402.03300](https://arxiv.org/abs/2402.03300), § 4.1
"""

from rlinf_vl.algorithms.advantages import group_advantages

DEFAULTS = {"normalize_advantages": True}
NEEDS_GROUPS = True
COMPARES_STATES = True


def advantages(rewards, group_ids, tokens, *, normalize):
    return group_advantages(rewards, group_ids, normalize=normalize)
