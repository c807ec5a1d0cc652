"""Alarms: what runs that collapse show in their metrics first, with what to try.

Most alarms compare means over `WINDOW` steps with the run's first ones, so they are silent in the first 2 × `WINDOW` steps.
Those of a run that can't learn anything (all groups tie, all answers are cut, none is paid) are judged from step 1 on. An alarm
is told when it begins, and again only after it was over for more than `WINDOW` steps.
"""

from collections import deque
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from statistics import fmean, pstdev

#: Steps whose mean is judged, and of the run's beginning.
WINDOW = 5
#: Steps over which a reward is flat.
FLAT = 30
#: Accuracy from which nothing is left to learn: then falling entropy and tied groups are no alarm.
LEARNED = 0.9
#: Entropy, answers' length: shares of what they were at first.
ENTROPY_LOW, ENTROPY_HIGH, LENGTH_LOW, LENGTH_HIGH = 0.1, 3.0, 0.3, 3.0
#: Nats by which entropy has to rise, too; what a reward has to gain for a change of length to be the better for it.
ENTROPY_RISE, REWARD_GAIN = 0.5, 0.05
#: Share of answers cut by max_new_tokens.
TRUNCATED = 0.5
#: KL to the reference and of one step's update, nats a token, and how many times it was before; the first is too much anyway at ...
REF_KL, STEP_KL, KL_GROWTH, REF_KL_ANYWAY = 0.5, 0.1, 5.0, 2.0
#: While a reward is flat: KL that is worth a word, and growth of it.
FLAT_KL, FLAT_GROWTH = 0.05, 2.0
#: Share of groups that tie.
TIED = 0.9
#: Mean |rollout - train logprob|, and how many times the run's first ones.
MISMATCH, MISMATCH_GROWTH = 0.05, 3.0


@dataclass
class History:
    """Training steps so far: the first ones, and the last."""

    groups: int | None
    first_rows: list[Mapping[str, float]] = field(default_factory=list)
    rows: deque[Mapping[str, float]] = field(default_factory=lambda: deque(maxlen=FLAT))

    def add(self, metrics: Mapping[str, float]) -> None:
        if len(self.first_rows) < WINDOW:
            self.first_rows.append(metrics)
        self.rows.append(metrics)

    def first(self, name: str) -> float:
        """Mean of a metric over the run's first steps; NaN, with which no comparison holds, where it has none."""
        return _mean(self.first_rows, name)

    def last(self, name: str, steps: int = WINDOW, before: int = 0) -> float:
        """Mean over the last steps, but for the `before` very last."""
        rows = list(self.rows)
        return _mean(rows[max(0, len(rows) - before - steps) : len(rows) - before], name)

    @property
    def compares(self) -> bool:
        """Whether there are enough steps to compare the last ones with the first."""
        return len(self.rows) >= 2 * WINDOW

    def always(self, name: str, value: float) -> bool:
        """Return whether a metric had this value in each of the last `WINDOW` steps, or in all if there are fewer."""
        recent_rows = list(self.rows)[-WINDOW:]
        return all(row.get(name) == value for row in recent_rows)

    @property
    def learned(self) -> bool:
        return self.last("reward/accuracy") >= LEARNED

    @property
    def rewarded(self) -> bool:
        return self.last("reward/mean") > self.first("reward/mean") + REWARD_GAIN


def _mean(rows: Iterable[Mapping[str, float]], name: str) -> float:
    values = [row[name] for row in rows if row.get(name) is not None]
    return fmean(values) if values else float("nan")


def _entropy_collapse(h: History) -> str | None:
    now, first = h.last("actor/entropy"), h.first("actor/entropy")
    if now < ENTROPY_LOW * first and not h.learned:
        return (
            f"actor/entropy is {now:.3g}, at first it was {first:.3g}, and accuracy is {h.last('reward/accuracy'):.2f}"
        )
    return None


def _entropy_explosion(h: History) -> str | None:
    now, first = h.last("actor/entropy"), h.first("actor/entropy")
    if now > max(ENTROPY_HIGH * first, first + ENTROPY_RISE):
        return f"actor/entropy is {now:.3g}, at first it was {first:.3g}"
    return None


def _kl_blow_up(h: History) -> str | None:
    for name, floor, anyway in (("actor/ref_kl", REF_KL, REF_KL_ANYWAY), ("actor/approx_kl", STEP_KL, float("inf"))):
        now, before = h.last(name), h.last(name, WINDOW, before=WINDOW)
        if now > anyway or now > floor and now > KL_GROWTH * before:
            return f"{name} is {now:.3g} nats a token, {WINDOW} steps before it was {before:.3g}"
    return None


def _length_collapse(h: History) -> str | None:
    now, first = h.last("rollout/response_length_mean"), h.first("rollout/response_length_mean")
    if now < LENGTH_LOW * first and not h.rewarded:
        return f"answers have {now:.0f} tokens, at first {first:.0f}, and the reward has not risen"
    return None


def _length_explosion(h: History) -> str | None:
    now, first = h.last("rollout/response_length_mean"), h.first("rollout/response_length_mean")
    cut, cut_first = h.last("rollout/truncated"), h.first("rollout/truncated")
    if now > LENGTH_HIGH * first and not h.rewarded:
        return f"answers have {now:.0f} tokens, at first {first:.0f}, and the reward has not risen"
    if cut > TRUNCATED and cut_first < TRUNCATED / 2:
        return f"{cut:.0%} of the answers are cut by max_new_tokens, at first {cut_first:.0%}"
    return None


def _reward_free(h: History) -> str | None:
    if len(h.rows) < FLAT or h.learned:
        return None
    third, rewards = FLAT // 3, [row["reward/mean"] for row in h.rows if row.get("reward/mean") is not None]
    gained = h.last("reward/mean", third) - h.last("reward/mean", third, before=2 * third)
    if len(rewards) < FLAT or gained > max(0.01, pstdev(rewards) / third**0.5):
        return None
    kl, kl_before = (h.last("actor/ref_kl", third, before=before) for before in (0, 2 * third))
    if kl > FLAT_KL and kl > FLAT_GROWTH * kl_before:
        return f"in {FLAT} steps the reward went by {gained:+.3f}, and actor/ref_kl from {kl_before:.3g} to {kl:.3g}"
    entropy, entropy_before = (h.last("actor/entropy", third, before=before) for before in (0, 2 * third))
    if entropy < entropy_before / FLAT_GROWTH:
        return f"in {FLAT} steps the reward went by {gained:+.3f}, and actor/entropy from {entropy_before:.3g} to {entropy:.3g}"
    return None


def _groups_tied(h: History) -> str | None:
    if h.groups is None or h.learned:
        return None
    if not h.compares:
        all_tied = h.always("reward/zero_std_groups", h.groups)
        return f"{_since_start(h)} all groups tie: nothing is learned from the reward" if all_tied else None
    share = h.last("reward/zero_std_groups") / h.groups
    return f"{share:.0%} of the groups tie: nearly nothing is learned from the reward" if share >= TIED else None


def _all_cut(h: History) -> str | None:
    if not h.always("rollout/truncated", 1.0):
        return None
    return (
        f"{_recently(h)} every answer was cut at {h.last('rollout/response_length_mean'):.0f} tokens, before it could end: "
        "a cut answer is graded as wrong"
    )


def _no_reward(h: History) -> str | None:
    if h.groups is None or not h.always("reward/accuracy", 0.0) or not h.always("reward/std", 0.0):
        return None
    return f"{_recently(h)} every answer got the same reward, {h.last('reward/mean'):.3g}, and none was right"


def _since_start(h: History) -> str:
    return "in step 1" if len(h.rows) == 1 else f"in steps 1 to {len(h.rows)}"


def _recently(h: History) -> str:
    return _since_start(h) if len(h.rows) <= WINDOW else f"in the last {WINDOW} steps"


def _mismatch(h: History) -> str | None:
    name = "actor/rollout_train_abs_diff_mean"
    now, first = h.last(name), h.first(name)
    return (
        f"{name} is {now:.3g} nats, at first it was {first:.3g}"
        if now > max(MISMATCH, MISMATCH_GROWTH * first)
        else None
    )


@dataclass(frozen=True, slots=True)
class Alarm:
    """One alarm: `judge` says what is wrong, or None; `early` ones are judged from step 1 on."""

    kind: str
    judge: Callable[[History], str | None]
    advice: str
    early: bool = False


ALARMS = (
    Alarm(
        "answers_cut",
        _all_cut,
        "read some answers (report.html): raise algorithm.sampling_params.max_new_tokens and runner.seq_length if they are sound; "
        "if they repeat themselves or never stop, take an instruct model, or ask for short answers in data.system_prompt",
        early=True,
    ),
    Alarm(
        "no_reward",
        _no_reward,
        "read some answers (report.html) beside their reference answers: if right ones are among them, the reward function can't "
        "read their form ('rlinf-vl check-reward FILE:NAME' tries it), so ask for that form in data.prompt_suffix; if none is "
        "right, take easier problems or a better model",
        early=True,
    ),
    Alarm(
        "entropy_collapse",
        _entropy_collapse,
        "lower actor.optim.lr, raise algorithm.clip_ratio_high, or set a small algorithm.entropy_bonus",
    ),
    Alarm(
        "entropy_explosion",
        _entropy_explosion,
        "lower algorithm.entropy_bonus or actor.optim.lr, raise algorithm.kl_beta; see actor/rollout_train_abs_diff_mean",
    ),
    Alarm(
        "kl_blow_up",
        _kl_blow_up,
        "from a checkpoint before it, a lower actor.optim.lr, fewer algorithm.n_minibatches, or a higher algorithm.kl_beta",
    ),
    Alarm(
        "length_collapse",
        _length_collapse,
        "read the answers: the reward may be had without thinking; set loss_agg_func=token-mean, or reward the form",
    ),
    Alarm(
        "length_explosion",
        _length_explosion,
        "read the last answers: set algorithm.overlong if they repeat themselves, raise max_new_tokens if they are sound",
    ),
    Alarm(
        "reward_free_drift",
        _reward_free,
        "the policy moves, and not by the reward: raise algorithm.kl_beta, lower actor.optim.lr, take problems that are neither "
        "solved nor hopeless",
    ),
    Alarm(
        "groups_tied",
        _groups_tied,
        "look at the rewards of a group (report.html): all 0 are problems too hard or a form that the reward can't read, all 1 too "
        "easy ones, equal answers a sampling temperature too low; raise algorithm.group_size, take problems of another difficulty, "
        "or set algorithm.dynamic_sampling.enable=true",
        early=True,
    ),
    Alarm(
        "mismatch_rising",
        _mismatch,
        "see docs/tis.md: lower actor.optim.lr, take the engine and the trainer to one precision, or record experts "
        "(actor.routing_replay) in a mixture",
    ),
)


class Alarms:
    """The alarms of one run. Give it each training step, in order."""

    def __init__(self, groups: int | None, past: Iterable[Mapping[str, float]] = ()) -> None:
        """`groups`: of a step; None: their rewards are not what is learned from. `past`: the metrics of the steps so far, whose
        alarms were told then."""
        self.active: dict[str, str] = {}
        self._history = History(groups)
        self._step = 0  # so many were given
        self._held: dict[str, int] = {}  # the last one in which each alarm held
        for metrics in past:
            self.check(metrics)

    def check(self, metrics: Mapping[str, float]) -> list[tuple[str, str]]:
        """What begins with this step: (kind, what is wrong and what to try). `active` has all that hold, by kind."""
        if "reward/mean" not in metrics:
            return []
        self._history.add(metrics)
        self._step += 1
        judged = [alarm for alarm in ALARMS if alarm.early or self._history.compares]
        verdicts = {alarm.kind: alarm.judge(self._history) for alarm in judged}
        self.active = {kind: verdict for kind, verdict in verdicts.items() if verdict is not None}
        new = [a for a in ALARMS if a.kind in self.active and self._step - self._held.get(a.kind, -FLAT) > WINDOW]
        self._held |= dict.fromkeys(self.active, self._step)
        return [(alarm.kind, f"{self.active[alarm.kind]}. Try: {alarm.advice}") for alarm in new]
