"""Rewards minus their group's mean, and a loss with a constant length below it.

    r − mean

A group whose rewards all tie gets exactly 0.

Liu et al., Understanding R1-Zero-Like Training, [2503.20783](https://arxiv.org/abs/2503.20783), § 3
"""

from rlinf_vl.algorithms.advantages import group_advantages

DEFAULTS = {"normalize_advantages": False, "loss_agg_func": "seq-mean-token-sum-norm"}
NEEDS_GROUPS = True
COMPARES_STATES = True


def advantages(rewards, group_ids, tokens, *, normalize):
    return group_advantages(rewards, group_ids, normalize=normalize)
