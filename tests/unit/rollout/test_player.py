"""Episodes with a scripted engine and scripted environments; and one with the torch engine, scored again by the trainer's model."""

import asyncio
import json
import os
import pickle
import threading
import time
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from episodes import encoded, make_player, message_of, picture
from scripted_engine import Scripted
from summaries import changed, values

from rlinf_vl.actor.privileged import as_teacher_sees
from rlinf_vl.controller.step_plan import trainable
from rlinf_vl.data.bad_rows import BadRows, NoVerdicts, TooManyFaults, check_faults, no_verdicts
from rlinf_vl.data.corruption import Corruption
from rlinf_vl.data.unusable import ImageError, RowError
from rlinf_vl.data.views import Noise
from rlinf_vl.engines.base import EngineDied
from rlinf_vl.envs import StepResult
from rlinf_vl.models.families import family_of
from rlinf_vl.models.image_tokens import ImageTokens
from rlinf_vl.models.processing import Processor
from rlinf_vl.observe.metrics import summarize_rollout
from rlinf_vl.rewards import GradingTimeout
from rlinf_vl.rewards.scoring import Score
from rlinf_vl.rollout.episode.privileged import privileged_text
from rlinf_vl.rollout.episode.rollout_state import RolloutState
from rlinf_vl.types import GroupSummary, Problem, Request, Sample, SamplingParams

FAMILY = family_of("qwen3_vl")


SHOWN = encoded(picture(96, 48, 9))
PROBLEM = Problem(
    "p:0",
    (
        {
            "role": "user",
            "content": [
                {"type": "image_url", "image_url": {"url": SHOWN.url}},
                {"type": "text", "text": "?"},
            ],
        },
    ),
    "18",
    (SHOWN,),
)


@pytest.fixture(scope="module")
def processor(toy_folder):
    return Processor(toy_folder, FAMILY)


class Env:
    """Says what its class's `script` says, one step after the other; remembers who was made, and what was called."""

    script = (StepResult((), 1.0, True, {"correct": True}),)
    made: list = []

    def __init__(self):
        self.number, self.calls, self.steps = len(self.made), [], iter(self.script)
        self.made.append(self)

    def start(self, problem):
        self.calls.append("start")
        return list(problem.messages)

    def step(self, response):
        self.calls.append(response)
        result = next(self.steps)
        if isinstance(result, Exception):
            raise result
        return result

    def close(self):
        self.calls.append("close")


@pytest.fixture
def env_class():
    return type("Fresh", (Env,), {"made": []})


class Maker:
    """As an `EnvMaker`, without a name to look up."""

    def __init__(self, make):
        self.make = make

    def __call__(self, problem, seed, group_seed):
        return self.make()

    def name_of(self, problem):
        return "scripted"


def player_of(processor, engine, make_env, **changed):
    arguments = {
        "seq_length": 200,
        "max_prompt_length": 100,
        "reward_min": -0.5,
        "return_logprobs": True,
        "alive_timeout_s": 1.0,
    }
    return make_player(engine, processor, Maker(make_env), **(arguments | changed))


def play(player, n=1, problem=PROBLEM, **sampling):
    async def played():
        group = await player.start_group(
            problem, range(n), SamplingParams(**{"max_new_tokens": 20, **sampling})
        )
        player.submit_first_requests([group])
        return await player.play_group("g", group)

    group = asyncio.run(played())
    return group, GroupSummary.of(group, player.client.renderer.processor.image_token_id)


def closed_once(env_class, n):
    """Whether `n` environments were made and each was closed, once; a slow close has time."""
    deadline = time.monotonic() + 60
    while not all("close" in env.calls for env in env_class.made) and time.monotonic() < deadline:
        time.sleep(0.01)
    return len(env_class.made) == n and all(
        env.calls.count("close") == 1 == env.calls[-1:].count("close") for env in env_class.made
    )


def test_a_single_turn_is_the_prompt_and_the_answer(processor, env_class):
    engine = Scripted(processor, ["\\boxed{18}"])
    group, summary = play(player_of(processor, engine, env_class), 3)
    (request,) = engine.requests
    assert request.seeds == (0, 1, 2) and request.images == (SHOWN,), "one request, one prefill"
    assert (
        group.prefix_length == len(request.ids)
        and values(summary, "reward") == (1.0,) * 3
        and values(summary, "correct") == (True,) * 3
    )
    for i, trajectory in enumerate(group.trajectories):
        (sequence,), (turn,) = trajectory.sequences, trajectory.turns
        n = group.prefix_length
        assert (turn.start, turn.end, turn.finish_reason, turn.reward) == (
            n,
            len(sequence.ids),
            "stop",
            1.0,
        )
        assert sequence.loss_mask.nonzero()[0].tolist() == list(range(n, turn.end))
        assert sequence.logprobs[n:].tolist() == [-k - i for k in range(1, turn.end - n + 1)]
    assert [env.calls for env in env_class.made] == [["start", "\\boxed{18}", "close"]] * 3


def test_a_teacher_gets_the_prompt_with_what_only_it_may_see(processor, env_class):
    problem = replace(PROBLEM, columns={"step": "3 + 4", "n": 2})
    template = "Hint {n}: {step} in {answer} \\boxed{}"
    players = [
        player_of(processor, Scripted(processor), env_class, privileged_template=text)
        for text in (None, template)
    ]
    (plain, _), (group, summary) = (play(player, 2, problem) for player in players)
    hint = "\nHint 2: 3 + 4 in 18 \\boxed{}"
    for without, trajectory in zip(plain.trajectories, group.trajectories, strict=True):
        (sequence,), (turn,) = trajectory.sequences, trajectory.turns
        assert without.teacher_prompt == () and np.array_equal(
            without.sequences[0].ids, sequence.ids
        )
        prompt, teacher_prompt = sequence.ids[: turn.start], np.array(trajectory.teacher_prompt)
        text, teacher_text = map(processor.tokenizer.decode, (prompt, teacher_prompt))
        begin, end = os.path.commonprefix([text, teacher_text]), hint
        assert teacher_text == begin + end + text[len(begin) :], "nothing else differs"
        image = processor.image_token_id
        assert (prompt == image).sum() == (teacher_prompt == image).sum() > 0

    taught = as_teacher_sees(group, processor.image_token_id)
    assert taught.prefix_length == len(group.trajectories[0].teacher_prompt)
    for ours, theirs in zip(group.trajectories, taught.trajectories, strict=True):
        (a,), (b,) = ours.sequences, theirs.sequences
        assert np.array_equal(a.ids[a.loss_mask], b.ids[b.loss_mask]) and a.images == b.images
        assert np.array_equal(a.logprobs[a.loss_mask], b.logprobs[b.loss_mask])
        assert theirs.turn_tokens == ours.turn_tokens


def test_a_privileged_text_needs_the_values_that_it_names():
    assert privileged_text(PROBLEM, "The answer is {answer}.") == "The answer is 18."
    assert privileged_text(replace(PROBLEM, answer="{n}"), "{answer} {}") == "{n} {}"
    with pytest.raises(RowError, match=r"\{steps\} has no value in this row, which has answer"):
        privileged_text(PROBLEM, "{answer} {steps}")
    with pytest.raises(RowError, match=r"\{n\} has no value"):
        privileged_text(replace(PROBLEM, columns={"n": ""}), "{n}")


def test_a_turn_goes_on_behind_the_answer_as_it_was_sampled_with_all_images_so_far(
    processor, env_class
):
    """An observation that brings a new image and shows one of the problem again; an answer that was cut."""
    new = picture(48, 96, 1)
    env_class.script = (
        StepResult(
            (
                message_of("look", new),
                {"role": "tool", "content": list(PROBLEM.messages[0]["content"])},
            ),
            0.25,
            False,
            {"reward_parts": {"form": 0.25}},
        ),
        StepResult((message_of("again"),), 0.0, False),
        StepResult((), 1.0, True, {"correct": True, "reward_parts": {"form": 0.5, "answer": 0.5}}),
    )
    engine = Scripted(processor, ["What", "3*6", "\\boxed{18}"], cut=("3*6",))
    group, summary = play(player_of(processor, engine, env_class))
    (trajectory,) = group.trajectories
    (sequence,) = trajectory.sequences
    assert (
        values(summary, "error") == (None,)
        and trajectory.reward == 1.25
        and trajectory.correct
        and trajectory.status == "stop"
    )
    assert trajectory.reward_parts == {"form": 0.75, "answer": 0.5}
    assert [turn.reward for turn in trajectory.turns] == [0.25, 0.0, 1.0]
    assert [turn.finish_reason for turn in trajectory.turns] == ["stop", "length", "stop"]
    for request, turn in zip(engine.requests, trajectory.turns, strict=True):
        assert request.ids.tolist() == sequence.ids[: turn.start].tolist()
    assert [len(request.images) for request in engine.requests] == [1, 3, 3]
    hashes = [image.hash for image, _ in sequence.images]
    assert hashes == [SHOWN.hash, encoded(new).hash, SHOWN.hash]
    assert len({request.seeds for request in engine.requests}) == 3, (
        "each turn has a random stream of its own"
    )
    sampled = [(turn.start, turn.end) for turn in trajectory.turns]
    expected = np.zeros(len(sequence.ids), bool)
    for start, end in sampled:
        expected[start:end] = True
        assert sequence.logprobs[start:end].max() < 0 and (sequence.versions[start:end] == 3).all()
        assert (sequence.columns["entropy"][start:end] == 0.5).all()
    assert (sequence.loss_mask == expected).all()
    assert (sequence.logprobs[~expected] == 0).all() and (sequence.versions[~expected] == -1).all()
    text = processor.tokenizer.decode(sequence.ids).replace("<|image_pad|>", "")
    image = "<|vision_start|><|vision_end|>"
    assert text == (
        f"<|im_start|>user\n{image}?<|im_end|>\n<|im_start|>assistant\nWhat<|im_end|>\n"
        f"<|im_start|>user\nlook{image}<|im_end|>\n<|im_start|>tool\n{image}?<|im_end|>\n<|im_start|>assistant\n3*6<|im_end|>\n"
        "<|im_start|>user\nagain<|im_end|>\n<|im_start|>assistant\n\\boxed{18}<|im_end|>"
    )
    assert group.prefix_length == len(engine.requests[0].ids)
    assert env_class.made[0].calls == ["start", "What", "3*6", "\\boxed{18}", "close"]


def test_the_budget_ends_an_episode_and_bounds_its_last_turn(processor, env_class):
    env_class.script = (StepResult((message_of("go on"),), 0.5, False),) * 100
    engine = Scripted(processor, ["3*6=18"], cut=("3*6=18",))
    group, summary = play(player_of(processor, engine, env_class, seq_length=80), max_new_tokens=12)
    (trajectory,) = group.trajectories
    assert trajectory.status == "length" and values(summary, "error") == (None,)
    assert all(r.sampling.max_new_tokens == min(12, 80 - len(r.ids)) > 0 for r in engine.requests)
    assert len(trajectory.sequences[0].ids) == trajectory.turns[-1].end, (
        "nothing stands behind the last answer"
    )
    assert trajectory.reward == 0.5 * len(trajectory.turns) and closed_once(env_class, 1)


def test_starts_that_differ_share_the_prefix_that_they_have_in_common(processor, env_class):
    images = [picture(48, 48, 1), picture(48, 48, 2)]

    def start(self, problem):
        return (
            [message_of("see", images[self.number // 2 % 2], "now")]
            if self.number < 4
            else [message_of("say")]
        )

    env_class.start = start
    engine = Scripted(processor)
    group, summary = play(player_of(processor, engine, env_class), 4)
    assert [request.seeds for request in engine.requests] == [(0, 1), (2, 3)]
    prefix = group.prefix
    assert processor.tokenizer.decode(prefix) == "<|im_start|>user\nsee<|vision_start|>", (
        "an image is shared whole or not"
    )
    assert values(summary, "error") == (None,) * 4 and len(group.images) == 2
    group, _ = play(player_of(processor, engine, env_class), 1)
    assert group.prefix_length == len(engine.requests[-1].ids)


def test_starts_with_arrays_are_images_and_share_nothing_known_beforehand(processor, env_class):
    env_class.start = lambda self, problem: [message_of(np.asarray(picture()), "?")]
    engine = Scripted(processor)
    group, summary = play(player_of(processor, engine, env_class), 2)
    assert values(summary, "error") == (None,) * 2 and group.prefix_length == len(
        engine.requests[0].ids
    )


def test_an_answer_without_a_verdict_is_wrong_and_no_bad_row(processor, env_class, tmp_path):
    env_class.script = (GradingTimeout("no verdict in 0.5 s"),)
    group, summary = play(player_of(processor, Scripted(processor), env_class), 4)
    assert values(summary, "error") == (None,) * 4 and values(summary, "correct") == (False,) * 4
    assert values(summary, "reward") == (-0.5,) * 4 and all(values(summary, "ungradable"))
    assert all(t.reward_parts == {"ungradable": 1.0} for t in group.trajectories)
    bad = BadRows(tmp_path, 0.0, {"train": 4})
    bad.add_failed("train", [summary], 1)
    bad.check()
    metrics = summarize_rollout([summary], 1.0)
    assert (
        metrics["reward/ungradable"] == 4
        and metrics["reward/accuracy"] == 0
        and metrics["rollout/errors"] == 0
    )


def test_the_engines_failure_is_not_the_rows(processor, env_class, tmp_path):
    engine = Scripted(processor, [TimeoutError("not answered within 600 s")])
    _, summary = play(player_of(processor, engine, env_class), 4)
    assert values(summary, "error") == ("engine: TimeoutError: not answered within 600 s",) * 4
    bad = BadRows(tmp_path, 0.0, {"train": 4})
    bad.add_failed("train", [summary], 1)
    bad.check()
    metrics = summarize_rollout([summary], 1.0)
    assert (
        metrics["rollout/errors"],
        metrics["rollout/engine_errors"],
        metrics["rollout/env_errors"],
    ) == (4, 4, 0)
    with pytest.raises(
        TooManyFaults, match=r"4 of 4 .*4 × engine: TimeoutError.*rollout\.episode_timeout"
    ):
        check_faults([summary])
    assert closed_once(env_class, 4)


def test_a_sample_that_the_engine_gave_up_on_is_an_error(processor, env_class):
    _, summary = play(player_of(processor, Scripted(processor, ["failed"]), env_class), 2)
    assert values(summary, "error") == ("engine: it gave up on this sample",) * 2 and closed_once(
        env_class, 2
    )


def test_a_failure_in_a_later_turn_leaves_what_was_sampled(processor, env_class):
    env_class.script = (StepResult((message_of("go on"),), 0.5, False),) * 2
    group, summary = play(
        player_of(processor, Scripted(processor, ["What", OSError("gone")]), env_class)
    )
    (trajectory,) = group.trajectories
    assert (
        values(summary, "error") == ("engine: OSError: gone",)
        and trajectory.reward == 0.0
        and trajectory.status == "error"
    )
    assert (
        len(trajectory.turns) == 1
        and trajectory.sequences[0].loss_mask.any()
        and closed_once(env_class, 1)
    )


def test_an_answer_without_a_verdict_after_a_paid_turn_is_worth_the_least_reward_once(
    processor, env_class
):
    """A tool environment pays reward_min for a call, so that the episode is worth that until it answers."""
    env_class.script = (
        StepResult((message_of("42"),), -0.5, False),
        GradingTimeout("no verdict in 0.5 s"),
    )
    _, summary = play(player_of(processor, Scripted(processor, ["call", "18"]), env_class))
    assert values(summary, "turn_rewards") == ((-0.5, 0.0),) and values(summary, "reward") == (
        -0.5,
    )
    env_class.script = (
        StepResult((message_of("42"),), 0.25, False),
        GradingTimeout("no verdict in 0.5 s"),
    )
    _, summary = play(player_of(processor, Scripted(processor, ["call", "18"]), env_class))
    assert values(summary, "turn_rewards") == ((0.25, -0.75),) and values(summary, "reward") == (
        -0.5,
    )


@pytest.mark.parametrize("fault", [OSError("the simulator crashed"), "slow"])
def test_faults_of_environments_can_be_penalized(processor, env_class, fault):
    """Two turns were answered when the environment fails. Masked, the trajectory is in no average and not trained on."""
    env_class.script = (StepResult((message_of("go on"),), 0.5, False), fault)
    if fault == "slow":
        step = env_class.step

        def slow_step(self, response):
            result = step(self, response)
            if result == "slow":
                threading.Event().wait(2)
            return result

        env_class.step = slow_step
    for penalize in (False, True):
        player = player_of(
            processor,
            Scripted(processor, ["What", "x"]),
            env_class,
            penalize_faults=penalize,
            turn_timeout_s=0.3,
        )
        group, summary = play(player, 2)
        metrics = summarize_rollout([summary], 1.0)
        assert metrics["rollout/errors"] == metrics["rollout/env_errors"] == 2
        assert metrics["rollout/penalized"] == 2 * penalize
        assert trainable(summary) == ([0, 1] if penalize else [])
        with pytest.raises(TooManyFaults, match="2 of 2 trajectories failed"):
            check_faults([summary])
        if penalize:
            assert (
                values(summary, "reward") == (-0.5, -0.5)
                and values(summary, "turn_rewards") == ((0.0, -0.5),) * 2
            )
            assert values(summary, "error") == (None, None) and values(summary, "correct") == (
                False,
                False,
            )
            assert values(summary, "base_reward") == (-0.5, -0.5)
            assert metrics["reward/mean"] == -0.5 and values(summary, "status") == ("error",) * 2
            assert all(
                reason.startswith("environment: 'scripted' ")
                for reason in values(summary, "penalized")
            )
            assert [t.penalized for t in pickle.loads(pickle.dumps(group)).trajectories] == list(
                values(summary, "penalized")
            )
        else:
            assert all(
                error.startswith("environment: 'scripted' ") for error in values(summary, "error")
            )


@pytest.mark.parametrize("case", ["start", "engine", "reward function"])
def test_faults_that_no_answer_led_to_are_masked_even_where_faults_are_penalized(
    processor, env_class, case
):
    engine = Scripted(processor)
    if case == "start":
        env_class.start = lambda self, problem: 1 / 0
    elif case == "engine":
        env_class.script = (StepResult((message_of("go on"),), 0.5, False),) * 2
        engine = Scripted(processor, ["What", OSError("gone")])
    else:
        env_class.script = (StepResult((), 0.0, True, {"answer": "18"}),)

    async def failing_score(problem, answers):
        return [Score(0.0, {}, False, fault="raised KeyError") for _ in answers]

    player = player_of(
        processor, engine, env_class, penalize_faults=True, score_answers=failing_score
    )
    _, summary = play(player)
    assert (
        values(summary, "error")[0] is not None
        and not any(values(summary, "penalized"))
        and trainable(summary) == []
    )


@pytest.mark.parametrize("fails", [None, "make", "start", "step", "close"])
def test_every_environment_is_closed_whatever_fails(processor, env_class, fails):
    """Every other one fails, and the others don't."""

    def failing(name, original):
        def call(self, *args):
            result = original(self, *args)
            if fails == name and self.number % 2:
                raise OSError(f"no {name} today")
            return result

        return call

    for name in ("start", "step", "close"):
        setattr(env_class, name, failing(name, getattr(env_class, name)))

    def make():
        env = env_class()
        if fails == "make" and env.number % 2:
            env.calls.append("close")  # nobody has it
            raise OSError("no make today")
        return env

    _, summary = play(player_of(processor, Scripted(processor), make), 4)
    failed = {None: 0, "make": 2, "start": 2, "step": 2, "close": 0}[fails]
    assert len([e for e in values(summary, "error") if e]) == failed
    assert all(
        e is None or e.startswith("environment: 'scripted' ") and f"no {fails} today" in e
        for e in values(summary, "error")
    )
    assert closed_once(env_class, 4)
    assert summarize_rollout([summary], 1.0)["rollout/env_errors"] == failed
    if fails == "step":
        report = check_faults([summary])
        assert report is not None and "2 of 4" in report
        assert "2 × environment: 'scripted' failed: OSError: no step today" in report
    assert check_faults([]) is None


def test_a_prompt_that_is_too_long_is_the_rows_fault(processor, env_class):
    engine = Scripted(processor)
    group, summary = play(player_of(processor, engine, env_class, max_prompt_length=1), 2)
    assert all(
        e.startswith("prompt too long: the prompt has ") for e in values(summary, "error")
    ) and closed_once(env_class, 2)
    assert not engine.requests and group.prefix_length == 0 and values(summary, "tokens") == (0, 0)


@pytest.mark.parametrize(
    "start",
    [
        None,
        7,
        "case",
        ["case"],
        [{"role": "user", "content": [{"type": "image_url"}]}],
        [message_of(b"no image")],
        [
            {
                "role": "user",
                "content": [{"type": "image_url", "image_url": {"url": "image://unknown"}}],
            }
        ],
        [{"role": "user", "content": [{"type": "image", "image": "/etc/passwd"}]}],
    ],
)
def test_what_start_says_is_no_fault_of_the_row(processor, env_class, start):
    env_class.start = lambda self, problem: start
    _, summary = play(player_of(processor, Scripted(processor), env_class), 2)
    assert all(e.startswith("environment: 'scripted' ") for e in values(summary, "error")), values(
        summary, "error"
    )
    assert closed_once(env_class, 2)


@pytest.mark.parametrize(
    "messages", [None, 7, ["case"], [message_of(b"no image")], [message_of("a", picture(1, 400))]]
)
def test_what_an_environment_answers_is_no_fault_of_the_row(processor, env_class, messages):
    env_class.script = (StepResult(messages, 0.0, False),)
    _, summary = play(player_of(processor, Scripted(processor), env_class), 2)
    assert all(
        e.startswith("environment: 'scripted' answered what can't follow: ")
        for e in values(summary, "error")
    )
    assert closed_once(env_class, 2)


@pytest.mark.parametrize("reward", [float("nan"), float("inf"), None, "much"])
def test_a_reward_is_a_finite_number(processor, env_class, reward):
    env_class.script = (StepResult((), reward, True),)
    _, summary = play(player_of(processor, Scripted(processor), env_class))
    assert values(summary, "error")[0].startswith("environment: 'scripted' failed: ") and values(
        summary, "reward"
    ) == (0.0,)


def test_an_image_that_can_not_be_decoded_is_the_fault_of_whoever_showed_it(processor, env_class):
    error = ImageError("image can't be decoded", "it is truncated")
    _, summary = play(player_of(processor, Scripted(processor, [error]), env_class))
    assert values(summary, "error") == ("image can't be decoded: it is truncated",)
    env_class.script = (StepResult((message_of(picture()),), 0.0, False),)
    _, summary = play(player_of(processor, Scripted(processor, ["18", error]), env_class))
    assert values(summary, "error")[0].startswith(
        "environment: 'scripted' shows an image that can't be used: "
    )


def test_a_row_whose_messages_make_no_prompt_is_a_bad_row(processor, env_class):
    player = player_of(processor, Scripted(processor), env_class)
    problem = Problem(
        "p:1", ({"role": "user", "content": [{"type": "image", "image": b"none"}]},), "1"
    )
    with pytest.raises(RowError, match="no image"):
        player.builder.from_row(problem)
    _, summary = play(player, 2, problem)
    assert all(e.startswith("prompt unusable: ImageError: ") for e in values(summary, "error"))


def test_messages_of_a_generator_are_read_once(processor, env_class):
    env_class.start = lambda self, problem: iter(problem.messages)
    env_class.script = (
        StepResult(iter((message_of("on"),)), 0.0, False),
        StepResult((), 1.0, True),
    )
    _, summary = play(player_of(processor, Scripted(processor), env_class))
    assert values(summary, "error") == (None,)


def test_parts_of_a_reward_are_recorded_as_plain_numbers(processor, env_class):
    env_class.script = (
        StepResult((), np.float32(1), True, {"reward_parts": {"format": np.float32(0.5)}}),
    )
    group, _ = play(player_of(processor, Scripted(processor), env_class), 2)
    assert json.dumps([t.reward_parts for t in group.trajectories]) == json.dumps(
        [{"format": 0.5}] * 2
    )
    env_class.script = (StepResult((), 1.0, True, {"reward_parts": {"format": "half"}}),)
    _, summary = play(player_of(processor, Scripted(processor), env_class), 2)
    assert all(
        e.startswith("environment: 'scripted' failed: ValueError") for e in values(summary, "error")
    )
    assert values(summary, "reward") == (0.0,) * 2


def test_what_an_environment_measures_and_the_facts_of_a_turn_are_kept(processor, env_class):
    call = {"name": "zoom", "arguments": {"x": 1}}
    env_class.script = (
        StepResult(
            (message_of("on"),),
            0,
            False,
            {"metrics": {"moves": np.int64(1), "seen": 2}, "tool_calls": [call]},
        ),
        StepResult((), 1, True, {"metrics": {"moves": 3}, "state": "end"}),
    )
    group, summary = play(player_of(processor, Scripted(processor), env_class))
    assert values(summary, "metrics") == ({"moves": 3.0, "seen": 2.0},) and values(
        summary, "turns"
    ) == (2,)
    facts = [json.loads(turn.info) for turn in group.trajectories[0].turns]
    assert facts == [{"tool_calls": [call]}, {"state": "end"}]


@pytest.mark.parametrize(
    "info",
    [{"metrics": {"a": float("nan")}}, {"metrics": 3}, {"state": 7}, {"tool_calls": {1j}}, 5],
)
def test_facts_of_another_kind_are_the_environments_error(processor, env_class, info):
    env_class.script = (StepResult((), 1.0, True, info),)
    _, summary = play(player_of(processor, Scripted(processor), env_class))
    assert values(summary, "error")[0].startswith("environment: 'scripted' failed: ") and values(
        summary, "metrics"
    ) == ({},)


def test_environments_are_closed_where_the_engine_dies(processor, env_class):
    engine = Scripted(processor, [None])
    player = player_of(processor, engine, env_class)

    async def die_once_asked():
        group = await player.start_group(PROBLEM, range(3), SamplingParams(), patience_s=None)
        player.submit_first_requests([group])
        playing = asyncio.ensure_future(player.play_group("g", group))
        await asyncio.sleep(0.05)
        engine.is_alive = False
        engine.futures[0].set_exception(RuntimeError("gone"))
        await playing

    with pytest.raises(EngineDied, match="gone"):
        asyncio.run(die_once_asked())
    assert closed_once(env_class, 3)


def test_an_episode_that_nobody_waits_for_closes_its_environment_after_its_step(
    processor, env_class
):
    begun, goes_on = threading.Event(), threading.Event()

    def step(self, response):
        begun.set()
        assert goes_on.wait(10)
        self.calls.append("step ended")
        return StepResult((), 1.0, True)

    env_class.step = step
    player = player_of(processor, Scripted(processor), env_class)

    async def abandon():
        group = await player.start_group(PROBLEM, (0,), SamplingParams())
        player.submit_first_requests([group])
        running = asyncio.ensure_future(player.play_group("g", group))
        await asyncio.to_thread(begun.wait, 10)
        running.cancel()
        asyncio.get_running_loop().call_later(0.02, goes_on.set)
        await asyncio.gather(running, return_exceptions=True)

    asyncio.run(abandon())
    assert env_class.made[0].calls == ["start", "step ended", "close"]


def test_what_the_engine_samples_in_two_turns_the_trainers_model_scores_alike(toy, env_class):
    from rlinf_vl.models.policy import PolicyModel
    from rlinf_vl.packing.collator import Collator, Member

    env_class.script = (
        StepResult((message_of("wrong,", picture(48, 96, 5), "again"),), 0.0, False),
        StepResult((), 1.0, True),
    )
    player = player_of(toy.processor, toy.engine, env_class)
    group, summary = play(player, 4, max_new_tokens=8, stop_ids=toy.processor.stop_ids)
    assert values(summary, "error") == (None,) * 4 and all(
        len(t.turns) == 2 for t in group.trajectories
    )
    assert len({t.sequences[0].ids.tobytes() for t in group.trajectories}) > 1
    collate = Collator(
        FAMILY,
        toy.processor.image_tokens,
        toy.pixels,
        toy.processor.pad_id,
    )
    batch = collate([Member(group, i, [0.0, 0.0]) for i in range(4)], run_vision=True)
    policy = PolicyModel(toy.model, FAMILY, toy.banned, temperature=1.0, chunk=None)
    with torch.no_grad():
        logprobs, _ = policy(batch)
    assert batch.rollout_logprobs is not None and len(batch.targets) == sum(
        values(summary, "response_tokens")
    )
    torch.testing.assert_close(
        logprobs, torch.from_numpy(batch.rollout_logprobs), atol=2e-5, rtol=0
    )


def test_a_later_answer_brings_the_routes_of_the_last_token_and_leaves_the_earlier_ones():
    """Loss tokens keep those they were sampled with, also where an engine computed them again, under newer weights."""
    state = RolloutState(PROBLEM, 0)
    nowhere = SimpleNamespace(placeholder_ids=(99,), image_tokens=ImageTokens(99))
    for prompt, answer, first in (([5, 6, 7], [8, 9], 10), ([5, 6, 7, 8, 9, 3], [4, 1], 40)):
        n = len(answer)
        routes = np.arange(first, first + len(prompt) + n, dtype=np.uint8)[:, None].repeat(
            2, axis=1
        )
        routes[-1] = 0
        request = Request(
            np.array(prompt, np.int32), (), np.zeros((0, 3), np.int32), SamplingParams(), (0,)
        )
        drawn = np.array(answer, np.int32), np.zeros(n, np.float32), np.zeros(n, np.int32)
        state.add_sample(request, Sample(*drawn, "stop", {"routes": routes}), nowhere)
    (sequence,) = state.sequences
    assert sequence.columns["routes"][:, 1].tolist() == [10, 11, 12, 13, 44, 45, 46, 0]


@pytest.mark.parametrize(
    "part",
    [{"type": "video_url", "video_url": {"url": "a.mp4"}}, {"type": "video", "video": "a.mp4"}],
)
def test_an_unusable_video_of_an_environment_is_told(processor, env_class, part):
    env_class.script = (StepResult([{"role": "user", "content": [part]}], 0.0, False),)
    group, _ = play(player_of(processor, Scripted(processor), env_class))
    (t,) = group.trajectories
    assert t.error is not None and t.error.startswith(
        "environment: 'scripted' answered what can't follow"
    )
    assert "'/" in t.error and "a.mp4' is neither base64 of a video nor a file in /" in t.error


def test_some_of_a_group_see_corrupted_images_and_all_are_trained_on_with_the_clean_ones(
    processor, env_class
):
    """An environment that shows a new image later: that is corrupted, too."""
    new = picture(48, 96, 1)
    env_class.script = (
        StepResult((message_of("look", new),), 0.0, False),
        StepResult((), 1.0, True, {"correct": True}),
    )
    engine = Scripted(processor, ["\\boxed{18}"])
    player = player_of(processor, engine, env_class)

    async def played():
        sampling = SamplingParams(max_new_tokens=20)
        group = await player.start_group(
            PROBLEM, range(4), sampling, 5, Corruption(Noise(0.5), share=0.5)
        )
        player.submit_first_requests([group])
        return await player.play_group("g", group)

    group = asyncio.run(played())
    summary = GroupSummary.of(group, processor.image_token_id)
    assert values(summary, "error") == (None,) * 4 and values(summary, "corrupted") == (
        False,
        False,
        True,
        True,
    )
    first = [[image.hash for image in request.images] for request in engine.requests[:2]]
    assert (
        first == [[SHOWN.hash], [group.corrupted_images[SHOWN.hash].hash]] != [[SHOWN.hash]] * 2
    ), "one request for each view"
    assert [request.seeds for request in engine.requests[:2]] == [(0, 1), (2, 3)]
    shown = {SHOWN.hash, encoded(new).hash}
    assert (
        group.corrupted_images.keys() == shown
        and {image.hash for image, _ in group.images} == shown
    )
    assert group.prefix_length == len(engine.requests[0].ids), (
        "what is trained on shares the prompt"
    )
    assert {group.corrupted_images[name].hash for name in shown} <= summary.image_bytes.keys()
    seen = [
        [image.hash for s in group.as_seen(t).sequences for image, _ in s.images]
        for t in group.trajectories
    ]
    clean = [SHOWN.hash, encoded(new).hash]
    assert seen == [clean] * 2 + [[group.corrupted_images[name].hash for name in clean]] * 2
    sent = pickle.loads(pickle.dumps(group, protocol=5))
    assert sent.corrupted_images == group.corrupted_images and [
        t.corrupted for t in sent.trajectories
    ] == [
        False,
        False,
        True,
        True,
    ]


def test_rewards_of_spans_become_those_of_their_last_tokens(processor, env_class):
    """By the second of two answers; a span behind the response, or of another text, is a fault."""
    text = "12 + 6 = 18"
    env_class.script = (
        StepResult((message_of("go on"),), 0.5, False, {}),
        StepResult((), 0.0, True, {"answer": text}),
    )
    spans = [[(0, 6, 0.5), (6, 11, -1.0)], [(0, 12, 1.0)], []]

    async def score(problem, answers):
        return [Score(1.0, spans=tuple(entry)) for entry in spans]

    player = player_of(processor, Scripted(processor, (text,)), env_class, score_answers=score)
    group, summary = play(player, 3)
    graded, behind, plain = group.trajectories
    turn = graded.turns[1]
    ids = graded.sequences[turn.sequence].ids[turn.start : turn.end]
    assert [(number, value) for number, _, value in graded.token_rewards] == [(1, 0.5), (1, -1.0)]
    for (_, end, _), (_, token, _) in zip(spans[0], graded.token_rewards, strict=True):
        assert len(processor.decode(ids[:token])) < end <= len(processor.decode(ids[: token + 1]))
    assert values(summary, "token_rewards") == (graded.token_rewards, (), ())
    assert pickle.loads(pickle.dumps(group)).trajectories[0].token_rewards == graded.token_rewards
    assert "the span (0, 12) of a response of 11 characters" in behind.error
    assert plain.error is None
    env_class.script = (StepResult((), 0.0, True, {"answer": "another text"}),)
    group, _ = play(player, 3)
    assert "another text than the policy's answer" in group.trajectories[0].error
    assert group.trajectories[2].error is None


def test_answers_that_are_left_are_scored_as_a_group_and_added_to_what_was_paid(
    processor, env_class
):
    """The last one fails, the one before has no verdict; both parts and reasons go with their trajectories."""
    env_class.script = (
        StepResult((message_of("go on"),), 0.5, False, {"reward_parts": {"turn": 0.5}}),
        StepResult((), -0.25, True, {"answer": "18!"}),
    )
    asked = []

    async def score(problem, answers):
        asked.append(
            (problem, [(a.response, a.final_response, len(a.ids), a.truncated) for a in answers])
        )
        return [
            Score(1.0, {"math": 1.0}, True, values=(1.0, None)),
            Score(0.0, {"math": 0.0, "form": 0.0}, False, ("form: slow",)),
            Score(0.0, fault="judge: gone"),
        ]

    group, summary = play(
        player_of(processor, Scripted(processor), env_class, score_answers=score), 3
    )
    ((problem, answers),) = asked
    assert (
        problem is PROBLEM
        and [a[:2] for a in answers] == [("18!", "18!")] * 3
        and all(a[2] for a in answers)
    )
    right, slow, failed = group.trajectories
    assert (right.reward, right.correct, right.reward_parts) == (
        1.25,
        True,
        {"turn": 0.5, "math": 1.0},
    )
    assert [turn.reward for turn in right.turns] == [0.5, 0.75] and right.error is None
    # The environment paid 0.25, and an answer that is scored 0 gets the least reward, -0.5.
    assert (right.scores, right.base_reward) == ((1.0, None), -0.25)
    assert values(summary, "scores")[0] == right.scores
    assert values(summary, "base_reward")[0] == right.base_reward
    assert (
        slow.reward_parts == {"turn": 0.5, "math": 0.0, "form": 0.0, "ungradable": 1.0}
        and slow.reward == 0.25
    )
    assert failed.error == "environment: the reward function judge: gone" and failed.reward == 0.0
    assert sorted(values(summary, "ungraded")) == ["", "", "form: slow"]
    assert (
        no_verdicts([summary])
        == "1 of 2 answers have no verdict of a reward function: 1 × form: slow"
    )
    always = changed(summary, error=(None,) * 3, ungraded=("form: slow",) * 3)
    with pytest.raises(
        NoVerdicts, match=r"3 × form: slow\. So it is with every answer: mend the function"
    ):
        no_verdicts([always])
    some = [always, changed(summary, error=(None,) * 3, ungraded=("",) * 3)]
    no_verdicts(some)
    with pytest.raises(NoVerdicts, match=r"3 of 6 .*more than reward.max_ungradable=0.4 allows"):
        no_verdicts(some, 0.4)
    # One answer alone never ends a run.
    one = changed(summary, error=(None,) * 3, ungraded=("form: slow", "", ""))
    assert no_verdicts([one], 0.1) == (
        "1 of 3 answers have no verdict of a reward function: 1 × form: slow"
    )
    # Masked: an error that is no fault of the row or the environment, and keeps its reason.
    masked_group, masked = play(
        player_of(
            processor,
            Scripted(processor),
            env_class,
            score_answers=score,
            mask_ungraded=True,
        ),
        3,
    )
    slow = masked_group.trajectories[1]
    assert slow.error == "ungradable: form: slow" and slow.ungraded == "form: slow"
    assert values(masked, "ungradable") == (False, True, False) and len(masked.valid) == 1
    assert "1 of 2 answers" in (no_verdicts([masked]) or "")
    assert "1 of 3" in (check_faults([masked]) or "")  # the judge that is gone
    metrics = summarize_rollout([summary], 1.0)
    assert (
        metrics["reward/math"] == 0.5
        and metrics["reward/form"] == 0.0
        and metrics["reward/turn"] == 0.5
    )
    assert "reward/ungradable_part" not in metrics and metrics["reward/accuracy"] == 0.5


def test_a_fault_is_logged_once_with_the_traceback_of_the_users_code(processor, env_class, caplog):
    def step(self, response):
        return 1 / 0

    env_class.step = step
    engine = Scripted(processor, ["\\boxed{18}"] * 8)
    player = player_of(processor, engine, env_class)
    for _ in range(2):
        _, summary = play(player, n=4)
        assert len(values(summary, "error")) == 4
    (record,) = [
        record for record in caplog.records if record.name == "rlinf_vl.rollout.episode.faults"
    ]
    text = record.getMessage()
    assert (
        text.count("Traceback") == 1
        and "return 1 / 0" in text
        and "ZeroDivisionError: division by zero" in text
    )
    assert "rlinf_vl/rollout/" not in text and "\x1b[" not in text
