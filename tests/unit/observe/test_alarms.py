"""Alarms: each is raised by the run it is for, once, and by no ordinary one."""

import json
import math
import random
from pathlib import Path

import pytest

from rlinf_vl.observe.alarms import ALARMS, OVER, REPLAYED, WINDOW, Alarms
from rlinf_vl.observe.lines import EventLog
from rlinf_vl.observe.progress import RunProgress

GROUPS = 16
#: A run that learns nothing and in which nothing happens.
STILL = {
    "reward/mean": 0.3, "reward/accuracy": 0.3, "reward/zero_std_groups": 4, "actor/entropy": 0.8, "actor/ref_kl": 0.01,
    "actor/approx_kl": 0.001, "rollout/response_length_mean": 200.0, "rollout/truncated": 0.05,
    "actor/rollout_train_abs_diff_mean": 0.01, "rollout/unread_tool_calls": 0.01,
}  # fmt: skip


def told(rows, groups=GROUPS, prior=0.0):
    alarms = Alarms(groups, prior=prior)
    events = [(step, kind) for step, row in enumerate(rows, 1) for kind, _ in alarms.check(row)]
    return [(step, kind) for step, kind in events if not kind.endswith(OVER)]


def ending(steps=60, **last):
    """A still run whose metrics go, from step 20 on, evenly to these by step 40, and stay."""
    rows = []
    for step in range(1, steps + 1):
        share = min(1.0, max(0.0, (step - 20) / 20))
        rows.append(
            {name: value + share * (last.get(name, value) - value) for name, value in STILL.items()}
        )
    return rows


@pytest.mark.parametrize(
    ("kind", "last"),
    [
        ("entropy_collapse", {"actor/entropy": 0.01, "reward/mean": 0.6, "reward/accuracy": 0.6}),
        ("entropy_explosion", {"actor/entropy": 4.0}),
        ("kl_blow_up", {"actor/ref_kl": 9.0, "reward/mean": 0.9}),
        ("kl_blow_up", {"actor/approx_kl": 5.0}),
        ("length_collapse", {"rollout/response_length_mean": 9.0}),
        ("length_explosion", {"rollout/response_length_mean": 900.0}),
        ("length_explosion", {"rollout/truncated": 0.8}),
        ("reward_free_drift", {"actor/ref_kl": 0.3}),
        ("reward_free_drift", {"actor/entropy": 0.2}),
        ("groups_tied", {"reward/zero_std_groups": 16}),
        ("mismatch_rising", {"actor/rollout_train_abs_diff_mean": 0.2}),
        ("unread_tool_calls", {"rollout/unread_tool_calls": 0.03}),
    ],
)
def test_an_alarm_is_raised_once_by_what_it_is_for(kind, last):
    found = told(ending(**last))
    assert [k for _, k in found].count(kind) == 1, found
    assert {k for _, k in found} <= {kind, "reward_free_drift"}, (
        "a reward that stays while much moves is told as well"
    )
    assert all(step > 20 for step, _ in found)


@pytest.mark.parametrize(
    ("kind", "values", "look_at"),
    [
        ("groups_tied", {"reward/zero_std_groups": GROUPS}, "sampling temperature"),
        ("answers_cut", {"rollout/truncated": 1.0}, "max_new_tokens"),
        (
            "no_reward",
            {"reward/mean": 0.0, "reward/std": 0.0, "reward/accuracy": 0.0},
            "check-reward",
        ),
        (
            "no_reward",
            {"reward/mean": -1.0, "reward/std": 0.0, "reward/accuracy": 0.0},
            "data.prompt_suffix",
        ),
    ],
)
def test_a_run_that_can_learn_nothing_is_told_so_after_its_first_step(kind, values, look_at):
    alarms = Alarms(GROUPS)
    row = STILL | values
    ((told_kind, message),) = alarms.check(row)
    assert told_kind == kind and "in step 1" in message and look_at in message.partition("Try: ")[2]
    assert not any(alarms.check(row) for _ in range(40)), "told once"
    assert kind in alarms.active


def test_a_first_step_that_learns_or_has_learned_all_raises_nothing():
    assert (
        told(
            [
                STILL
                | {
                    "reward/std": 0.0,
                    "rollout/truncated": 0.99,
                    "reward/zero_std_groups": GROUPS - 1,
                }
            ]
        )
        == []
    )
    solved = {
        "reward/mean": 1.0,
        "reward/std": 0.0,
        "reward/accuracy": 1.0,
        "reward/zero_std_groups": GROUPS,
    }
    assert told([STILL | solved] * 3) == []


def test_each_alarm_says_what_to_try():
    alarms = Alarms(GROUPS)
    ((kind, message),) = [
        said for row in ending(**{"rollout/truncated": 0.8}) for said in alarms.check(row)
    ]
    assert (
        kind == "length_explosion"
        and "80%" not in message.partition("Try: ")[2]
        and "overlong" in message
    )
    assert len({alarm.kind for alarm in ALARMS}) == len(ALARMS) and all(
        alarm.advice for alarm in ALARMS
    )


def learning(seed, steps=150):
    """As the toy's ordinary run: the reward rises to 0.95 with noise, the entropy falls to a quarter, half of the groups tie."""
    noise = random.Random(seed)
    for step in range(1, steps + 1):
        share = 1 - math.exp(-step / 30)
        reward = min(1.0, max(0.0, 0.25 + 0.7 * share + noise.gauss(0, 0.06)))
        yield {
            "reward/mean": reward, "reward/accuracy": reward, "reward/zero_std_groups": round(2 + 8 * share),
            "actor/entropy": 0.16 - 0.12 * share + noise.gauss(0, 0.01), "actor/approx_kl": 0.0, "actor/ref_kl": 0.08 * share,
            "rollout/response_length_mean": 9 + noise.gauss(0, 0.5), "rollout/truncated": 0.01 * (1 - share),
            "actor/rollout_train_abs_diff_mean": 1e-7,
        }  # fmt: skip


@pytest.mark.parametrize("seed", range(5))
def test_a_run_that_learns_raises_none(seed):
    assert told(learning(seed)) == []


def test_what_is_learned_may_tie_and_be_sure_of_itself():
    done = {
        "reward/mean": 0.99,
        "reward/accuracy": 0.99,
        "reward/zero_std_groups": 16,
        "actor/entropy": 0.0,
    }
    assert told(ending(**done)) == []


def test_longer_and_shorter_answers_are_fine_where_they_pay():
    for length in (9.0, 900.0):
        assert (
            told(
                ending(
                    **{
                        "rollout/response_length_mean": length,
                        "reward/mean": 0.7,
                        "reward/accuracy": 0.7,
                    }
                )
            )
            == []
        )


def test_metrics_that_a_run_lacks_raise_none():
    assert (
        told([{"reward/mean": 0.3}] * 60) == []
        and told([{"val/accuracy": 0.5, "reward/mean": 0.1}] * 60) == []
    )
    assert told(ending(**{"reward/zero_std_groups": 16}), groups=None) == [], (
        "a teacher alone is what is learned from"
    )


def test_an_alarm_at_its_threshold_is_not_told_again_and_again():
    rows = ending(**{"reward/zero_std_groups": 16})
    flapping = [
        {**rows[-1], "reward/zero_std_groups": 16 - 4 * (step % 7 == 0)} for step in range(60)
    ]
    assert len(told(rows + flapping)) == 1
    again = told(rows + ending(steps=19) + rows)
    assert [kind for _, kind in again] == ["groups_tied"] * 2, "it was over for longer"


def test_a_resumed_run_judges_by_its_whole_past_and_tells_no_alarm_twice():
    rows = ending(**{"actor/entropy": 4.0})
    whole = told(rows)
    for step in (3, 25, 40, 55):
        resumed = Alarms(GROUPS, rows[:step])
        rest = [
            (n, kind)
            for n, row in enumerate(rows[step:], step + 1)
            for kind, _ in resumed.check(row)
        ]
        assert rest == [(n, kind) for n, kind in whole if n > step]
    assert resumed.active.keys() == {"entropy_explosion"}


def test_the_line_and_the_event_say_it(tmp_path: Path, caplog: pytest.LogCaptureFixture):
    alarms, log = Alarms(GROUPS), EventLog(tmp_path)
    rows = ending(steps=45, **{"reward/zero_std_groups": 16})
    with caplog.at_level("INFO"), RunProgress() as progress:
        progress.begin(60)
        for step, row in enumerate(rows, 1):
            for kind, message in alarms.check(row):
                log.add(step, kind, message)
            progress.update(step, row, alarms.active)
    lines = [
        record.getMessage()
        for record in caplog.records
        if record.getMessage().startswith("step 45/60")
    ]
    assert lines and lines[0].endswith("! groups tied")
    (event,) = [json.loads(line) for line in (tmp_path / "events.jsonl").read_text().splitlines()]
    assert (
        event["kind"] == "groups_tied"
        and "dynamic_sampling" in event["message"]
        and event["step"] > 20 + WINDOW
    )


def test_the_end_of_an_alarm_is_told_with_the_steps_in_which_it_held():
    alarms = Alarms(GROUPS)
    rows = [*ending(steps=45, **{"reward/zero_std_groups": 16}), *[STILL] * 20]
    events = [(n, *event) for n, row in enumerate(rows, 1) for event in alarms.check(row)]
    ((begin, kind, _), (end, end_kind, message)) = events
    assert (kind, end_kind) == ("groups_tied", "groups_tied" + OVER) and not alarms.active
    last = end - WINDOW - 1
    assert message == f"the alarm is over: it held in steps {begin} to {last}" and last < 50


def test_a_replay_is_written_only_for_alarms_that_it_can_explain():
    assert sorted(REPLAYED) == ["kl_blow_up", "mismatch_rising"]


def validated(seen, guessed, error=0.03, reward=0.8, control="", blank=None):
    """A run whose reward rises, with a validation every fifth step."""
    seen_name, guessed_name = f"val/gain_seen{control}", f"val/gain_guessed{control}"
    rows = ending(**{"reward/mean": reward})
    for step, row in enumerate(rows, 1):
        if step % 5 == 0:
            share = min(1.0, max(0.0, (step - 20) / 20))
            row |= {seen_name: share * seen, guessed_name: share * guessed}
            row |= {f"{seen_name}_stderr": error, f"{guessed_name}_stderr": error}
            row |= {} if blank is None else {f"val/accuracy{control or '_blank'}": blank}
    return rows


def test_a_reward_that_rises_by_guessing_is_told():
    alarms = Alarms(GROUPS)
    found = [message for row in validated(0.01, 0.4) for _, message in alarms.check(row)]
    assert len(found) == 1
    assert "validation of step 25 the gain with a blank image is +0.100 ± 0.030" in found[0]
    assert "needs the right one +0.003 ± 0.030" in found[0]


def test_the_answers_prior_is_no_guessing():
    """A policy that learned to give the most frequent answer, right in 30 %, and one that guesses."""
    assert told(validated(0.01, 0.28, blank=0.32), prior=0.3) == []
    alarms = Alarms(GROUPS, prior=0.3)
    rows = validated(0.01, 0.4, blank=0.6)
    ((kind, message),) = [event for row in rows for event in alarms.check(row)]
    assert kind == "not_seen"
    assert "0.60 are right without it, and one answer to all questions gets 0.30" in message


def test_swapped_images_tell_of_guessing_that_blank_ones_hide():
    rows = validated(0.4, 0.0)
    for row, swapped in zip(rows, validated(0.0, 0.4, control="_swapped"), strict=True):
        row |= swapped
    assert "not_seen" in {kind for _, kind in told(rows)}


@pytest.mark.parametrize(
    "rows",
    [
        validated(0.4, 0.0),
        validated(0.2, 0.3),  # both: it looks, too
        validated(0.0, 0.4, error=0.25),  # too few questions to know
        validated(0.0, 0.4, reward=0.3),  # the reward has not risen
    ],
)
def test_it_is_told_of_no_other_run(rows):
    assert "not_seen" not in {kind for _, kind in told(rows)}
