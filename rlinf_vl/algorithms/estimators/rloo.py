"""Rewards minus the mean of their group's other rewards.

    r − mean of the other G − 1

A group whose rewards all tie gets exactly 0.

Ahmadian et al., Back to Basics, [2402.14740](https://arxiv.org/abs/2402.14740), § 3.3
"""

from rlinf_vl.algorithms.advantages import group_advantages

DEFAULTS = {"normalize_advantages": False}
NEEDS_GROUPS = True
COMPARES_STATES = True


def advantages(rewards, group_ids, tokens, *, normalize):
    return group_advantages(rewards, group_ids, normalize=normalize, leave_one_out=True)
