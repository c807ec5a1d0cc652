"""The `gymnasium` environment on real ones: FrozenLake, MiniGrid, Crafter; seeds, answers, texts, frames, and refusals."""

from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest

from rlinf_vl.config import load_config
from rlinf_vl.envs import EnvMaker
from rlinf_vl.errors import ConfigError
from rlinf_vl.extras.gymnasium import Gymnasium
from rlinf_vl.tools.check.inputs import RULES
from rlinf_vl.types import Problem

LAKE = {
    "id": "FrozenLake-v1",
    "make_kwargs": {"is_slippery": False},
    "actions": ["left", "down", "right", "up"],
}
TEXTS = "Task: $task. Say $actions.\n<image>\n---\nTurn $turn, $left left, $reward paid.<image>\n---\nNot $example."
PROBLEM = Problem(
    "p:0", ({"role": "user", "content": [{"type": "text", "text": "reach <image> $5"}]},), "1"
)


def env_of(seed=1, group_seed=2, **changed):
    return Gymnasium(**{**LAKE, "template": TEXTS, **changed}, seed=seed, group_seed=group_seed)


def started(**changed):
    env = env_of(**changed)
    return env, env.start(PROBLEM)


def texts(messages):
    return [
        part["text"]
        for message in messages
        for part in message["content"]
        if part["type"] == "text"
    ]


def frames(messages):
    return [
        np.asarray(part["image"])
        for m in messages
        for part in m["content"]
        if part["type"] == "image"
    ]


def test_an_episode_is_walked_to_its_end():
    env, messages = started(max_episode_steps=20, reward_scale=2.0)
    assert texts(messages) == ["Task: reach <image> $5. Say left, down, right, up.\n"], (
        "a row's words are words"
    )
    (first,) = frames(messages)
    assert first.shape == (256, 256, 3)
    for said in ("down", r"so \boxed{left}, no: \boxed{Down}", "**right**", "DOWN.", "right"):
        result = env.step(said)
        assert not result.done and result.reward == 0.0 and not result.info["correct"]
    assert texts(result.messages) == ["Turn 5, 15 left, 0 paid."] and not np.array_equal(
        *frames(result.messages), first
    )
    last = env.step("right")
    assert last.done and last.reward == 2.0 and last.messages == () and last.info["correct"]
    assert last.info["metrics"] == {"steps": 6, "invalid_answers": 0, "episode_reward": 1.0}
    with pytest.raises(RuntimeError):
        env.step("right")
    env.close()
    env.close()


@pytest.mark.parametrize(
    "answer", ["", "jump", r"left \boxed{}", r"\boxed{left right}", "left or right", "<|im_end|>"]
)
def test_an_invalid_answer_is_answered_and_is_a_step_of_the_episode(answer):
    env, _ = started(invalid_reward=-0.1, max_episode_steps=2)
    result = env.step(answer)
    assert (result.reward, result.done) == (-0.1, False)
    assert texts(result.messages) == ["Not left."] and not frames(result.messages)
    result = env.step(answer)
    assert result.done and result.info["metrics"] == {
        "steps": 0,
        "invalid_answers": 2,
        "episode_reward": 0.0,
    }


def test_the_group_seed_draws_the_start_and_the_seed_the_rest():
    kwargs = {
        "id": "minigrid:MiniGrid-MultiRoom-N2-S4-v0",
        "make_kwargs": {},
        "actions": None,
        "template": "<image>\n---\n",
    }

    def start(**seeds):
        return frames(started(**kwargs, **seeds)[1])[0]

    assert np.array_equal(start(seed=1, group_seed=2), start(seed=9, group_seed=2))
    assert not np.array_equal(start(group_seed=2), start(group_seed=3))

    def walk(seed):
        env, _ = started(make_kwargs={"is_slippery": True}, seed=seed, max_episode_steps=12)
        walked = []
        while not walked or not walked[-1].done:
            walked.append(env.step("right"))
        return [result.info["state"] for result in walked]

    walks = [walk(seed) for seed in range(6)]
    assert len({tuple(w) for w in walks}) > 1 and walk(3) == walks[3]
    assert len({w[0] for w in walks}) == 1, "equal starts are equal states"


def test_frames_have_the_size_and_the_history_that_was_asked_for():
    env, messages = started(history=3, size=96)
    assert [frame.shape for frame in frames(messages)] == [(96, 96, 3)]
    env.step("down")
    result = env.step("down")
    shown = frames(result.messages)
    assert len(shown) == 3 and np.array_equal(shown[0], frames(messages)[0])
    assert not np.array_equal(shown[1], shown[2])
    assert len(frames(env.step("right").messages)) == 3
    assert frames(started(size=[64, 32])[1])[0].shape == (64, 32, 3)


def test_minigrid_says_its_mission_and_names_its_actions():
    env, messages = started(
        id="minigrid:MiniGrid-Empty-5x5-v0",
        make_kwargs={},
        actions=None,
        template="$mission: $actions<image>\n---\n",
    )
    assert texts(messages) == [
        "get to the green goal square: left, right, forward, pickup, drop, toggle, done"
    ]
    for said in ("forward", "forward", "right", "forward"):
        assert not env.step(said).done
    last = env.step("forward")
    assert last.done and last.info["correct"] and 0 < last.reward <= 1


@pytest.mark.slow
def test_crafter_has_the_old_form_and_no_registration():
    kwargs = {
        "id": "",
        "make": "crafter:Env",
        "make_kwargs": {"size": [126, 126]},
        "actions": None,
        "template": "<image>\n---\n",
    }
    env, messages = started(**kwargs, metrics=["achievements", "discount", "semantic"])
    assert frames(messages)[0].shape == (126, 126, 3)
    assert np.array_equal(frames(messages)[0], frames(started(**kwargs, seed=5)[1])[0])
    assert not np.array_equal(frames(messages)[0], frames(started(**kwargs, group_seed=5)[1])[0])
    result = env.step("move_left")
    assert result.info["metrics"].keys() >= {
        "achievements/collect_wood",
        "discount",
        "episode_reward",
    }
    assert "semantic" not in result.info["metrics"] and not result.done
    env.close()


def test_a_parser_takes_the_tables_place():
    env, first = started(parser="builtins:len")  # an answer's length is the action
    assert np.array_equal(frames(env.step("").messages)[0], frames(first)[0]), "against the wall"
    assert not np.array_equal(frames(env.step("a").messages)[0], frames(first)[0])
    env, _ = started(parser="json:dumps", actions=None)
    with pytest.raises(KeyError):
        env.step("no such action")


@pytest.mark.slow
def test_many_episodes_at_once_do_not_disturb_each_other():
    def episode(seed):
        env, messages = started(
            make_kwargs={"is_slippery": True}, seed=seed, group_seed=0, max_episode_steps=5
        )
        seen = [frames(messages)[0].tobytes()]
        while not (result := env.step("right")).done:
            seen.append(frames(result.messages)[0].tobytes())
        env.close()
        return seen

    alone = [episode(seed) for seed in range(4)]
    with ThreadPoolExecutor(32) as pool:
        assert list(pool.map(episode, [seed % 4 for seed in range(96)])) == alone * 24


@pytest.mark.parametrize(
    ("kwargs", "expected"),
    [
        ("{}", "give either id (of gymnasium.make) or make (module:callable)"),
        ("{id: FrozenLak-v1}", "Did you mean: `FrozenLake`"),
        ("{id: 'nowhere:Lake-v1'}", "No module named 'nowhere'"),
        ("{make: 'math:pi'}", "'math:pi' is no callable; write module:name"),
        ("{make: crafter}", "'crafter' is no callable"),
        ("{id: FrozenLake-v1, history: 0}", "history=0"),
        ("{id: FrozenLake-v1, size: 0}", "size=0 must be a number of pixels"),
        ("{id: FrozenLake-v1, actions: left}", "actions='left' must be a list of names"),
        ("{id: FrozenLake-v1, template: once}", "write two or three texts"),
        (
            "{id: FrozenLake-v1, template: '@nowhere.txt'}",
            "rollout.env_kwargs.template: no file 'nowhere.txt'",
        ),
        ("{id: FrozenLake-v1, action: [a]}", "takes no keyword 'action'; it takes id, make"),
    ],
)
def test_what_can_not_work_is_refused_before_anything_starts(kwargs, expected):
    with pytest.raises(ConfigError) as error:
        load_config(
            "toy-grpo-cpu", ["rollout.env_class=gymnasium", f"rollout.env_kwargs={kwargs}"], RULES
        )
    assert len(error.value.problems) == 1 and expected in str(error.value)


def test_a_row_does_not_choose_which_function_is_called():
    make = EnvMaker("gymnasium", {"id": "FrozenLake-v1"}, {}, lambda *_: False, 1.0, 0.0)
    make.check(
        Problem("p", (), "", columns={"env_kwargs": {"id": "minigrid:MiniGrid-Empty-5x5-v0"}})
    )
    with pytest.raises(ValueError, match="gives make, which rollout.env_kwargs alone may say"):
        make.check(Problem("p", (), "", columns={"env_kwargs": {"make": "subprocess:Popen"}}))


def test_a_text_travels_with_the_config(tmp_path, monkeypatch):
    (tmp_path / "texts.txt").write_text(TEXTS)
    monkeypatch.chdir(tmp_path)
    config = load_config(
        "toy-grpo-cpu",
        [
            "rollout.env_class=gymnasium",
            "rollout.env_kwargs={id: FrozenLake-v1, template: '@texts.txt'}",
        ],
        RULES,
    )
    assert config.rollout.env_kwargs["template"] == TEXTS
