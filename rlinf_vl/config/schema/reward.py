"""Keys of `reward`: functions that score answers, and the scale of rewards."""

from dataclasses import dataclass, field
from typing import Any

from rlinf_vl.config.schema.limits import POSITIVE, SHARE, OrCode, key


@dataclass
class RewardConfig:
    reward_type: str = key("math", OrCode())
    """Function that scores an answer: a name in docs/rewards.md (math, exact, choice, …), or a
    function of yours, as module:name or path/to/file.py:name. The short form of reward.functions
    with one entry, which replaces it."""
    functions: list[dict[str, Any]] = key([], OrCode())
    """Several of them, added up: a list of {function, weight: 1.0, kwargs: {}}, such as [{function:
    math}, {function: format, weight: 0.1}]. kwargs are further keywords of the function. The first
    that judges answers says what is correct (val/accuracy)."""
    reward_max_val: float = 1.0
    """Reward of a score of 1, such as that of a right answer; reward_min_val + (reward_max_val -
    reward_min_val) · score."""
    reward_min_val: float = 0.0
    """Reward of a score of 0, such as that of a wrong answer."""

    timeout: float = key(10.0, POSITIVE)
    """Seconds that a function of yours has for an answer (for a group's, if it takes a list). Its
    process is then ended, and the answer has no verdict (reward.ungradable)."""
    ungradable: str = key("mask", ("mask", "penalize"))
    """Treatment of a training answer on which a reward function came to no verdict: it raised, ran
    out of time or memory, or gave no number. mask: the answer is left out, also of its group's
    baseline. penalize: that function scores 0, and the answer is trained on. Both count it in
    reward/ungradable. A validation counts it as a wrong answer."""
    max_ungradable: float = key(0.1, SHARE)
    """Largest share of a step's answers without a verdict; a step with more of them, and more than
    one, ends the run with the reasons. 1 allows any share below all."""
    judge_hosts: list[str] = field(default_factory=list)
    """Hosts that the reward function `judge` may ask, by name without port. [] asks nobody."""

    @property
    def entries(self) -> list[dict[str, Any]]:
        """The reward functions, in the form of `functions`."""
        return self.functions or [{"function": self.reward_type}]

    @property
    def weights(self) -> tuple[float, ...]:
        """The weight of each reward function."""
        return tuple(float(entry.get("weight", 1.0)) for entry in self.entries)
