"""Alarms: the first signs of a collapsing run in its metrics, with advice.

Most alarms compare means over `WINDOW` steps with the run's first ones, so they are silent in the
first 2 × `WINDOW` steps. Those of a run that can't learn anything (all groups tie, all answers are
cut, none is rewarded) are judged from step 1 on. An alarm is reported when it begins, and again
only after it was over for more than `WINDOW` steps. When it is over for as long, that is reported,
with the steps in which it held.
"""

from collections import deque
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from statistics import fmean, pstdev

#: Steps in a mean: of the newest steps, which are judged, and of the first steps, their yardstick.
WINDOW = 5
#: Steps without a gain after which a reward counts as flat.
FLAT = 30
#: Accuracy from which nothing is left to learn: a policy that solves its problems is sure of its
#: answers, so falling entropy and tied groups are no alarm then.
LEARNED = 0.9
#: Bounds of the entropy and of the answers' length, as multiples of their first values.
ENTROPY_LOW, ENTROPY_HIGH, LENGTH_LOW, LENGTH_HIGH = 0.1, 3.0, 0.3, 3.0
#: Nats by which the entropy must rise as well: three times almost nothing is no explosion. Gain of
#: the mean reward that justifies a change of length.
ENTROPY_RISE, REWARD_GAIN = 0.5, 0.05
#: Share of answers cut by max_new_tokens, above which it is an alarm.
TRUNCATED = 0.5
#: KL to the reference and KL of one step's update, both in nats a token, and the growth that makes
#: an alarm of them. From REF_KL_ANYWAY on, the KL to the reference needs no growth.
REF_KL, STEP_KL, KL_GROWTH, REF_KL_ANYWAY = 0.5, 0.1, 5.0, 2.0
#: KL to the reference, and its growth, that make an alarm while the reward is flat.
FLAT_KL, FLAT_GROWTH = 0.05, 2.0
#: Share of calls of tools that could not be read.
UNREAD = 0.02
#: Share of tied groups: all rewards of a group are equal, so it has no advantage to learn from.
TIED = 0.9
#: Mean |rollout - train logprob| in nats, and its growth since the first steps.
MISMATCH, MISMATCH_GROWTH = 0.05, 3.0
#: The split of a gain in validation by two controls: the accuracy under the control, what is seen,
#: its standard error, what is guessed, its standard error.
SPLITS = {
    "a blank": (
        "val/accuracy_blank",
        "val/gain_seen",
        "val/gain_seen_stderr",
        "val/gain_guessed",
        "val/gain_guessed_stderr",
    ),
    "another question's": (
        "val/accuracy_swapped",
        "val/gain_seen_swapped",
        "val/gain_seen_swapped_stderr",
        "val/gain_guessed_swapped",
        "val/gain_guessed_swapped_stderr",
    ),
}
#: Standard errors from which a gain in validation counts as one.
SURE_ERRORS = 2.0
#: Ends the kind of the event that says that an alarm is over.
OVER = "_over"


@dataclass
class History:
    """The metrics of the run's first steps and of its newest ones.

    Attributes:
        prior: the accuracy in validation of the one answer that is right most often.
    """

    groups: int | None
    prior: float = 0.0
    first_rows: list[Mapping[str, float]] = field(default_factory=list)
    rows: deque[Mapping[str, float]] = field(default_factory=lambda: deque(maxlen=FLAT))

    def add(self, metrics: Mapping[str, float]) -> None:
        if len(self.first_rows) < WINDOW:
            self.first_rows.append(metrics)
        self.rows.append(metrics)

    def first(self, name: str) -> float:
        """Return a metric's mean over the run's first steps; NaN, with which no comparison holds,
        if it has none."""
        return _mean(self.first_rows, name)

    def last(self, name: str, steps: int = WINDOW, skip: int = 0) -> float:
        """Return a metric's mean over `steps` steps, the newest `skip` steps left out; NaN if it
        has none."""
        rows = list(self.rows)
        return _mean(rows[max(0, len(rows) - skip - steps) : len(rows) - skip], name)

    @property
    def compares(self) -> bool:
        """Return whether there are enough steps to compare the newest ones with the first."""
        return len(self.rows) >= 2 * WINDOW

    def always(self, name: str, value: float) -> bool:
        """Return whether a metric had this value in each of the last `WINDOW` steps, or in all if
        there are fewer."""
        recent_rows = list(self.rows)[-WINDOW:]
        return all(row.get(name) == value for row in recent_rows)

    @property
    def learned(self) -> bool:
        """Return whether the policy already solves its problems."""
        return self.last("reward/accuracy") >= LEARNED

    @property
    def rewarded(self) -> bool:
        """Return whether the reward has risen since the first steps."""
        return self.last("reward/mean") > self.first("reward/mean") + REWARD_GAIN


def _mean(rows: Iterable[Mapping[str, float]], name: str) -> float:
    values = [row[name] for row in rows if row.get(name) is not None]
    return fmean(values) if values else float("nan")


def _entropy_collapse(h: History) -> str | None:
    recent, first = h.last("actor/entropy"), h.first("actor/entropy")
    if recent < ENTROPY_LOW * first and not h.learned:
        return (
            f"actor/entropy is {recent:.3g}, at first it was {first:.3g}, and accuracy is "
            f"{h.last('reward/accuracy'):.2f}"
        )
    return None


def _entropy_explosion(h: History) -> str | None:
    recent, first = h.last("actor/entropy"), h.first("actor/entropy")
    if recent > max(ENTROPY_HIGH * first, first + ENTROPY_RISE):
        return f"actor/entropy is {recent:.3g}, at first it was {first:.3g}"
    return None


def _kl_blow_up(h: History) -> str | None:
    for name, floor, ceiling in (
        ("actor/ref_kl", REF_KL, REF_KL_ANYWAY),
        ("actor/approx_kl", STEP_KL, float("inf")),
    ):
        recent, earlier = h.last(name), h.last(name, WINDOW, skip=WINDOW)
        if recent > ceiling or recent > floor and recent > KL_GROWTH * earlier:
            return (
                f"{name} is {recent:.3g} nats a token, {WINDOW} steps before it was {earlier:.3g}"
            )
    return None


def _length_collapse(h: History) -> str | None:
    recent, first = h.last("rollout/response_length_mean"), h.first("rollout/response_length_mean")
    if recent < LENGTH_LOW * first and not h.rewarded:
        return (
            f"answers have {recent:.0f} tokens, at first {first:.0f}, and the reward has not risen"
        )
    return None


def _length_explosion(h: History) -> str | None:
    recent, first = h.last("rollout/response_length_mean"), h.first("rollout/response_length_mean")
    cut, cut_first = h.last("rollout/truncated"), h.first("rollout/truncated")
    if recent > LENGTH_HIGH * first and not h.rewarded:
        return (
            f"answers have {recent:.0f} tokens, at first {first:.0f}, and the reward has not risen"
        )
    if cut > TRUNCATED and cut_first < TRUNCATED / 2:
        return f"{cut:.0%} of the answers are cut by max_new_tokens, at first {cut_first:.0%}"
    return None


def _reward_free(h: History) -> str | None:
    if len(h.rows) < FLAT or h.learned:
        return None
    # Thirds of the last `FLAT` steps: the newest is compared with the oldest.
    third = FLAT // 3
    rewards = [row["reward/mean"] for row in h.rows if row.get("reward/mean") is not None]
    gain = h.last("reward/mean", third) - h.last("reward/mean", third, skip=2 * third)
    # A gain within one standard error of a third's mean is noise: the reward is flat.
    if len(rewards) < FLAT or gain > max(0.01, pstdev(rewards) / third**0.5):
        return None
    kl = h.last("actor/ref_kl", third)
    earlier_kl = h.last("actor/ref_kl", third, skip=2 * third)
    if kl > FLAT_KL and kl > FLAT_GROWTH * earlier_kl:
        return f"in {FLAT} steps the reward went by {gain:+.3f}, and actor/ref_kl from {earlier_kl:.3g} to {kl:.3g}"
    entropy = h.last("actor/entropy", third)
    earlier_entropy = h.last("actor/entropy", third, skip=2 * third)
    if entropy < earlier_entropy / FLAT_GROWTH:
        return (
            f"in {FLAT} steps the reward went by {gain:+.3f}, "
            f"and actor/entropy from {earlier_entropy:.3g} to {entropy:.3g}"
        )
    return None


def _not_seen(h: History) -> str | None:
    if not h.rewarded:
        return None
    for control, (accuracy_name, *names) in SPLITS.items():
        validated = [row for row in h.rows if row.get(names[-1]) is not None]
        if not validated:
            continue
        newest = validated[-1]
        seen_gain, seen_error, guessed_gain, guessed_error = (newest[name] for name in names)
        accuracy = newest.get(accuracy_name, 1.0)
        # Every policy first learns which answers are frequent, and no question gives that away.
        if accuracy <= h.prior + SURE_ERRORS * guessed_error:
            continue
        # Where both rise, the one may be sure a validation before the other: what may be seen must
        # be less than what is guessed. A small validation shows neither, so silence proves nothing.
        is_guessed = guessed_gain > SURE_ERRORS * guessed_error
        may_be_seen = seen_gain + SURE_ERRORS * seen_error
        if is_guessed and seen_gain <= SURE_ERRORS * seen_error and may_be_seen <= guessed_gain:
            return (
                f"the reward went from {h.first('reward/mean'):.2f} to "
                f"{h.last('reward/mean'):.2f}, and at the validation of step {newest['step']:.0f} "
                f"the gain with {control} image is {guessed_gain:+.3f} ± {guessed_error:.3f}, and "
                f"what needs the right one {seen_gain:+.3f} ± {seen_error:.3f}"
                + _prior_text(accuracy, h.prior)
            )
    return None


def _prior_text(accuracy: float, prior: float) -> str:
    if not prior:
        return ""
    return (
        f"; {accuracy:.2f} are right without it, and one answer to all questions gets {prior:.2f}"
    )


def _groups_tied(h: History) -> str | None:
    if h.groups is None or h.learned:
        return None
    # A share above `TIED` needs a mean over steps; before there is one, only all groups of all
    # steps count.
    if not h.compares:
        all_tied = h.always("reward/zero_std_groups", h.groups)
        return (
            f"{_since_start(h)} all groups tie: nothing is learned from the reward"
            if all_tied
            else None
        )
    share = h.last("reward/zero_std_groups") / h.groups
    if share >= TIED:
        return f"{share:.0%} of the groups tie: nearly nothing is learned from the reward"
    return None


def _all_cut(h: History) -> str | None:
    if not h.always("rollout/truncated", 1.0):
        return None
    return (
        f"{_recently(h)} every answer was cut at {h.last('rollout/response_length_mean'):.0f} "
        "tokens, before it could end: a cut answer is graded as wrong"
    )


def _no_reward(h: History) -> str | None:
    if h.groups is None or not h.always("reward/accuracy", 0.0) or not h.always("reward/std", 0.0):
        return None
    return f"{_recently(h)} every answer got the same reward, {h.last('reward/mean'):.3g}, and none was right"


def _since_start(h: History) -> str:
    return "in step 1" if len(h.rows) == 1 else f"in steps 1 to {len(h.rows)}"


def _recently(h: History) -> str:
    return _since_start(h) if len(h.rows) <= WINDOW else f"in the last {WINDOW} steps"


def _unread_calls(h: History) -> str | None:
    share = h.last("rollout/unread_tool_calls")
    # A single step may have a handful of calls.
    if len(h.rows) < WINDOW or not share > UNREAD:
        return None
    return f"{_recently(h)} {share:.0%} of the calls of tools could not be read"


def _mismatch(h: History) -> str | None:
    name = "actor/rollout_train_abs_diff_mean"
    recent, first = h.last(name), h.first(name)
    return (
        f"{name} is {recent:.3g} nats, at first it was {first:.3g}"
        if recent > max(MISMATCH, MISMATCH_GROWTH * first)
        else None
    )


@dataclass(frozen=True, slots=True)
class Alarm:
    """One alarm: `judge` returns a sentence that names the fault, or None; those `from_start` are
    judged from step 1 on, and a replay of the step can explain those with `replays`."""

    kind: str
    judge: Callable[[History], str | None]
    advice: str
    from_start: bool = False
    replays: bool = False


#: All alarms, in the order in which a step's new ones are reported.
ALARMS: tuple[Alarm, ...] = (
    Alarm(
        "answers_cut",
        _all_cut,
        "read some answers (report.html): raise algorithm.sampling_params.max_new_tokens and "
        "runner.seq_length if they are sound; if they repeat themselves or never stop, take an "
        "instruct model, or ask for short answers in data.system_prompt",
        from_start=True,
    ),
    Alarm(
        "no_reward",
        _no_reward,
        "read some answers (report.html) beside their reference answers: if right ones are among "
        "them, the reward function can't read their form ('rlinf-vl check-reward FILE:NAME' tries "
        "it), so ask for that form in data.prompt_suffix; if none is right, take easier problems "
        "or a better model",
        from_start=True,
    ),
    Alarm(
        "not_seen",
        _not_seen,
        "read answers of the newest steps beside their questions (report.html): something in the "
        "question's words gives the answer away; take such rows out, reword them, or filter those "
        "that are answered without an image",
    ),
    Alarm(
        "entropy_collapse",
        _entropy_collapse,
        "lower actor.optim.lr, raise algorithm.clip_ratio_high, or set a small "
        "algorithm.entropy_bonus",
    ),
    Alarm(
        "entropy_explosion",
        _entropy_explosion,
        "lower algorithm.entropy_bonus or actor.optim.lr, raise algorithm.kl_beta; see "
        "actor/rollout_train_abs_diff_mean",
    ),
    Alarm(
        "kl_blow_up",
        _kl_blow_up,
        "from a checkpoint before it, a lower actor.optim.lr, fewer algorithm.n_minibatches, or a "
        "higher algorithm.kl_beta",
        replays=True,
    ),
    Alarm(
        "length_collapse",
        _length_collapse,
        "read the answers: the reward may be had without thinking; set loss_agg_func=token-mean, "
        "or reward the form",
    ),
    Alarm(
        "length_explosion",
        _length_explosion,
        "read the last answers: set algorithm.overlong if they repeat themselves, raise "
        "max_new_tokens if they are sound",
    ),
    Alarm(
        "reward_free_drift",
        _reward_free,
        "the policy moves, and not by the reward: raise algorithm.kl_beta, lower actor.optim.lr, "
        "take problems that are neither solved nor hopeless",
    ),
    Alarm(
        "groups_tied",
        _groups_tied,
        "look at the rewards of a group (report.html): all 0 are problems too hard or a form that "
        "the reward can't read, all 1 too easy ones, equal answers a sampling temperature too "
        "low; raise algorithm.group_size, take problems of another difficulty, or set "
        "algorithm.dynamic_sampling.enable=true",
        from_start=True,
    ),
    Alarm(
        "unread_tool_calls",
        _unread_calls,
        "read such answers (report.html): if they are in another form than the checkpoint's chat "
        "template writes, let the template describe the tools (see docs/models.md), or describe "
        "that form in a message; if they break off, raise max_new_tokens; if they are broken, the "
        "policy has to learn the form first, by `rlinf-vl sft`",
        from_start=True,
    ),
    Alarm(
        "mismatch_rising",
        _mismatch,
        "see docs/tis.md: lower actor.optim.lr, take the engine and the trainer to one precision, "
        "or record experts (actor.routing_replay) in a mixture",
        replays=True,
    ),
)
#: The alarms that a replay of their step can explain: that engine and trainer part, or an update
#: that went too far.
REPLAYED = frozenset(alarm.kind for alarm in ALARMS if alarm.replays)


class Alarms:
    """The alarms of one run, which expects each training step, in order."""

    def __init__(
        self,
        groups: int | None,
        past: Iterable[Mapping[str, float]] = (),
        prior: float = 0.0,
    ) -> None:
        """Judge the steps before a resume, whose alarms were reported then.

        Args:
            groups: per step; None: the policy does not learn from their rewards.
            past: the metrics of the steps before.
            prior: the accuracy in validation of the one answer that is right most often.
        """
        self.active: dict[str, str] = {}
        self._history = History(groups, prior)
        self._step = 0  # steps judged so far
        #: By kind: the steps, first and last, between which an alarm that was reported held.
        self._spans: dict[str, tuple[int, int]] = {}
        for metrics in past:
            self.check(metrics)

    def check(self, metrics: Mapping[str, float]) -> list[tuple[str, str]]:
        """Return the alarms that begin with this step: (kind, the fault and the advice); and those
        that are over: (kind and `OVER`, the steps). `active` has all that hold, by kind."""
        if "reward/mean" not in metrics:
            return []
        self._step += 1
        self._history.add({"step": self._step} | dict(metrics))
        judged = [alarm for alarm in ALARMS if alarm.from_start or self._history.compares]
        verdicts = {alarm.kind: alarm.judge(self._history) for alarm in judged}
        self.active = {kind: verdict for kind, verdict in verdicts.items() if verdict is not None}
        # An alarm that holds on and off around its bound is one alarm: it is over, and may be new,
        # only after a pause.
        events = []
        for kind, (first, last) in list(self._spans.items()):
            if self._step - last > WINDOW:
                del self._spans[kind]
                steps = f"step {first}" if first == last else f"steps {first} to {last}"
                events.append((kind + OVER, f"the alarm is over: it held in {steps}"))
        for alarm in ALARMS:
            if (fault := self.active.get(alarm.kind)) is None:
                continue
            if alarm.kind not in self._spans:
                events.append((alarm.kind, f"{fault}. Try: {alarm.advice}"))
            first, _ = self._spans.get(alarm.kind, (self._step, self._step))
            self._spans[alarm.kind] = first, self._step
        return events
