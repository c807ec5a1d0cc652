"""Rewards minus their group's mean, normalized over all tokens of the rollout.

    that of `reinforce_plus_plus` of r − mean of the group

If all groups tie, every advantage is exactly 0.

Hu et al., REINFORCE++, [2501.03262](https://arxiv.org/abs/2501.03262)
"""

from rlinf_vl.algorithms.advantages import group_advantages, token_normalized

DEFAULTS = {"normalize_advantages": True}
NEEDS_GROUPS = True


def advantages(rewards, group_ids, tokens, *, normalize):
    # The group gives the baseline only; the deviation is that of the whole rollout.
    centered = group_advantages(rewards, group_ids, normalize=False)
    return token_normalized(centered, tokens, normalize=normalize)
