"""The Python that recipes bring along: rewards, a loss and two environments, against what they stand for."""

import runpy

import numpy as np
import pytest
import torch

from rlinf_vl.algorithms.losses import LossInputs
from rlinf_vl.recipes.catalog import FOLDER
from rlinf_vl.types import Problem

PROBLEM = Problem(id="0", messages=(), answer="")


def code_of(path: str) -> dict:
    return runpy.run_path(str(FOLDER / path))


@pytest.mark.parametrize(
    ("response", "score"),
    [
        ("<think>a\nb</think> <answer>2</answer>", 1.0),
        ("<answer></answer>", 0.75),
        ("<think>x</think>", 0.25),
        ("</answer><answer>", 0.0),
        ("", 0.0),
    ],
)
def test_shares_of_tags(response, score):
    assert code_of("nemo-clevr-cogent/tag_shares.py")["tag_shares"](response) == score


def test_the_masked_policy_gradient_by_hand():
    loss = code_of("prime-color-codeword/masked_policy_gradient.py")["loss"]
    old = np.array([0.1, 0.1, 0.5, 0.5, 0.3])
    new = np.array([0.2, 0.4, 0.2, 0.6, 0.6])
    advantages = np.array([1.0, 1.0, -1.0, -2.0, 0.0])
    # The second has risen too far, the third has fallen too far.
    kept = np.array([1.0, 0.0, 0.0, 1.0, 1.0])
    ratio = new / old
    expected = -kept * advantages * ratio + 1e-3 * np.log(ratio) ** 2
    logprobs = torch.tensor(np.log(new), requires_grad=True)
    inputs = LossInputs(
        logprobs=logprobs,
        old_logprobs=torch.tensor(np.log(old)),
        advantages=torch.tensor(advantages),
        mask=torch.ones(5, dtype=torch.bool),
    )
    result = loss(inputs)
    np.testing.assert_allclose(result.loss.detach().numpy(), expected)
    result.loss.sum().backward()
    gradient = -kept * advantages * ratio + 2e-3 * np.log(ratio)
    np.testing.assert_allclose(logprobs.grad.numpy(), gradient)


def test_a_codeword_is_shown_and_paid():
    code = code_of("prime-color-codeword/color_codeword.py")
    letters = {code["COLOURS"][name]: letter for name, letter in code["LETTERS"].items()}
    env = code["ColorCodeword"](images_per_turn=2, turns=3, group_seed=7)
    twin = code["ColorCodeword"](images_per_turn=2, turns=3, group_seed=7)
    wrong = code["ColorCodeword"](images_per_turn=2, turns=3, group_seed=7)
    twin.start(PROBLEM), wrong.start(PROBLEM)
    messages, word = env.start(PROBLEM), ""
    for turn in range(3):
        images = [part["image"] for part in messages[-1]["content"] if part["type"] == "image"]
        word += "".join(letters[image.getpixel((50, 50))] for image in images)
        result, same = env.step(f"It is {word}."), twin.step(word)
        other = wrong.step(word[::-1] + "A")
        assert result.done == same.done == (turn == 2)
        messages = result.messages
    assert len(word) == 6 and (result.reward, same.reward, other.reward) == (1.0, 1.0, 0.0)
    assert result.info["metrics"]["partial_match"] == 1.0


def test_a_lake_is_crossed_by_its_shortest_way():
    code = code_of("vagen-frozenlake/frozen_lake.py")
    env = code["FrozenLake"](group_seed=3, max_turns=20)
    messages = env.start(PROBLEM)
    assert [message["role"] for message in messages] == ["system", "user"]
    lake = env._env.desc.astype(str)
    assert code["has_path"](lake) and (lake == "S").sum() == (lake == "G").sum() == 1
    bad = env.step("Down")
    assert bad.reward == 0.0 and not bad.done, "an answer without tags moves nothing"
    steps = {"Left": (0, -1), "Down": (1, 0), "Right": (0, 1), "Up": (-1, 0)}
    paths = {tuple(np.argwhere(lake == "S")[0]): []}
    queue = list(paths)
    for cell in queue:
        for move, (down, right) in steps.items():
            there = cell[0] + down, cell[1] + right
            if there not in paths and min(there) >= 0 and max(there) < 4 and lake[there] != "H":
                paths[there] = [*paths[cell], move]
                queue.append(there)
    way = paths[tuple(np.argwhere(lake == "G")[0])]
    total = 0.0
    for first in range(0, len(way), 3):
        moves = ",".join(way[first : first + 3])
        result = env.step(f"<think>I go</think><answer>{moves}</answer>")
        total += result.reward
    assert result.done and result.info["correct"] and total == 10.0 + 0.5 * -(-len(way) // 3)
    env.close()


def test_a_lake_without_a_path_is_none():
    has_path = code_of("vagen-frozenlake/frozen_lake.py")["has_path"]
    assert not has_path(np.array([["S", "H"], ["H", "G"]]))
    assert has_path(np.array([["S", "H"], ["F", "G"]]))
