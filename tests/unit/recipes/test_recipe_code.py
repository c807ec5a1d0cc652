"""The Python that recipes bring along: rewards, a loss and three environments, against what they stand for."""

import runpy

import numpy as np
import pytest
import torch
from recipe_doubles import FOLDER

from rlinf_vl.algorithms.losses import LossInputs
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


SOKOBAN = code_of("vagen-sokoban/sokoban.py")
SOKOBAN_STEPS = {"Up": (-1, 0), "Down": (1, 0), "Left": (0, -1), "Right": (0, 1)}


def shortest_solution(room) -> list[str]:
    """Search forward, by the rules of the game and none of the environment's code."""
    boxes = room.start.boxes
    paths = {(room.start.player, boxes): []}
    queue = list(paths)
    for player, boxes in queue:
        path = paths[player, boxes]
        if boxes == room.targets:
            return path
        for name, (down, right) in SOKOBAN_STEPS.items():
            ahead = player[0] + down, player[1] + right
            pushed = boxes
            if ahead in boxes:
                pushed = boxes - {ahead} | {(ahead[0] + down, ahead[1] + right)}
            is_free = ahead in room.floor and pushed <= room.floor and len(pushed) == len(boxes)
            if is_free and (ahead, pushed) not in paths:
                paths[ahead, pushed] = [*path, name]
                queue.append((ahead, pushed))
    raise AssertionError("no solution")


def sokoban_answer(*moves: str) -> str:
    answer = f"<answer>{','.join(moves)}</answer>"
    return f"<observation>o</observation><think>t</think>\n{answer}<prediction>p</prediction>"


@pytest.mark.parametrize(("boxes", "limit"), [(1, 5), (2, 12)])
def test_rooms_of_sokoban_are_solved_by_their_shortest_path(boxes, limit):
    lengths = set()
    for seed in range(30):
        env = SOKOBAN["Sokoban"](group_seed=seed, boxes=boxes, solution=limit, max_turns=20)
        messages = env.start(PROBLEM)
        assert [message["role"] for message in messages] == ["system", "user"]
        room = env._room
        inside = {(row, column) for row in range(1, 5) for column in range(1, 5)}
        assert room.floor <= inside and len(room.start.boxes) == len(room.targets) == boxes
        assert not room.targets & (room.start.boxes | {room.start.player})
        path = shortest_solution(room)
        assert 1 <= len(path) <= limit
        lengths.add(len(path))
        answers = [path[first : first + 3] for first in range(0, len(path), 3)]
        results = [env.step(sokoban_answer(*moves)) for moves in answers]
        assert [result.done for result in results] == [False] * (len(answers) - 1) + [True]
        total = sum(result.reward for result in results)
        assert results[-1].info["correct"] and total == pytest.approx(1 + 0.1 * len(answers))
        assert results[-1].info["metrics"] == {"turns": len(answers), "invalid_answers": 0}
    assert {1, 2, 4, 5} <= lengths if boxes == 1 else max(lengths) > 5


def test_a_room_of_sokoban_is_that_of_its_seed():
    first, twin, other = (SOKOBAN["Sokoban"](group_seed=seed) for seed in (4, 4, 5))
    images = []
    for env in (first, twin, other):
        images.append(env.start(PROBLEM)[1]["content"][1]["image"])
    assert first._room == twin._room != other._room
    assert images[0].size == (96, 96) and images[0].tobytes() == images[1].tobytes()
    row, column = first._room.start.player
    red, green, blue = images[0].getpixel((column * 16 + 8, row * 16 + 8))
    assert green > max(red, blue)


@pytest.mark.parametrize(
    ("step", "player", "boxes"),
    [
        ("up", (1, 1), {(2, 2), (2, 3)}),  # a wall
        ("down", (2, 1), {(2, 2), (2, 3)}),
        ("right", (1, 2), {(2, 2), (2, 3)}),
    ],
)
def test_a_step_of_sokoban(step, player, boxes):
    floor = frozenset((row, column) for row in range(1, 5) for column in range(1, 5))
    state = SOKOBAN["State"]((1, 1), frozenset({(2, 2), (2, 3)}))
    after = SOKOBAN["move"](state, SOKOBAN["STEPS"][step], floor)
    assert (after.player, after.boxes) == (player, boxes)


@pytest.mark.parametrize(
    ("player", "boxes", "step", "pushed"),
    [
        ((1, 2), {(2, 2), (2, 3)}, "down", {(3, 2), (2, 3)}),
        ((2, 1), {(2, 2), (2, 3)}, "right", None),  # a box behind the box
        ((2, 2), {(2, 3), (2, 4)}, "right", None),
        ((3, 3), {(4, 3)}, "down", None),  # a wall behind the box
        ((3, 3), {(3, 2)}, "right", {(3, 2)}),  # boxes are not pulled
    ],
)
def test_a_push_of_sokoban(player, boxes, step, pushed):
    floor = frozenset((row, column) for row in range(1, 5) for column in range(1, 5))
    state = SOKOBAN["State"](player, frozenset(boxes))
    after = SOKOBAN["move"](state, SOKOBAN["STEPS"][step], floor)
    assert after == state if pushed is None else after.boxes == pushed


@pytest.mark.parametrize(
    ("response", "executed", "reward", "n_invalid"),
    [
        (sokoban_answer("Left", "left ", " LEFT", "Up"), "left, left, left", 0.1, 0),
        (sokoban_answer("Up", "Jump", "Down"), "up", 0.1, 1),
        (sokoban_answer("Jump"), "none", 0.0, 1),
        (sokoban_answer(), "none", 0.0, 1),
        ("Well: " + sokoban_answer("Up"), "up", 0.1, 0),
        ("<answer>Up</answer>", "none", 0.0, 1),
        ("", "none", 0.0, 1),
    ],
)
def test_an_answer_of_sokoban(response, executed, reward, n_invalid):
    env = SOKOBAN["Sokoban"](group_seed=0, max_turns=2)
    env.start(PROBLEM)
    result = env.step(response)
    assert not result.done and not result.info["correct"] and result.reward == reward
    assert f": {executed}. " in result.messages[0]["content"][0]["text"]
    assert result.info["metrics"] == {"turns": 1, "invalid_answers": n_invalid}
    last = env.step("")
    assert last.done and last.messages == [] and not last.info["correct"]
