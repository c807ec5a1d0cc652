"""Rewards minus a baseline that weighs a group's rewards by their lengths (OPO).

    r − Σ n·r / Σ n, of the group

The baseline has the least variance if the gradient of a response grows with its length. A group
whose rewards all tie gets exactly 0.

Hao et al., On-Policy RL with Optimal Reward Baseline, [2505.23585](https://arxiv.org/abs/2505.23585), § 3.2
"""

from rlinf_vl.algorithms.advantages import group_advantages

DEFAULTS = {"normalize_advantages": False}
NEEDS_GROUPS = True


def advantages(rewards, group_ids, tokens, *, normalize):
    return group_advantages(rewards, group_ids, normalize=normalize, weights=tokens)
