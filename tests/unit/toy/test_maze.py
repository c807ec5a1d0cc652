"""The maze: its geometry, the split, slips, pictures and the demonstrations."""

import itertools
from collections import Counter

import numpy as np
import pytest
from demonstration_batch import demonstrated_sequences

from rlinf_vl.extras.toy import maze
from rlinf_vl.extras.toy.maze import MAX_TURNS, Maze, Position
from rlinf_vl.extras.toy.warm_start import build_toy_checkpoint
from rlinf_vl.models.families import family_of
from rlinf_vl.models.processing import Processor
from rlinf_vl.rollout.episode.observation import observe
from rlinf_vl.rollout.episode.renderer import Renderer
from rlinf_vl.types import Problem

#: Column 1 is a wall but for the bottom row.
WALLED = "A#../.#../.#G./...."


def problem(text: str) -> Problem:
    return Problem("m", (), "", columns={"maze": text})


def new_env(seed: int = 0, **keywords) -> Maze:
    return Maze(reward_max=1.0, reward_min=-1.0, seed=seed, **keywords)


def steps_between(position: Position) -> int | None:
    """Length of a shortest path, by powers of the adjacency matrix."""
    free = [cell for cell in itertools.product(range(4), repeat=2) if cell not in position.walls]
    near = np.array([[abs(a - c) + abs(b - d) == 1 for c, d in free] for a, b in free], float)
    reached = np.eye(len(free))[free.index(position.agent)]
    for steps in range(len(free)):
        if reached[free.index(position.goal)]:
            return steps
        reached = reached @ near
    return None


@pytest.fixture(scope="module")
def rows() -> dict[str, list[Position]]:
    return {
        split: [Position.of_text(row["maze"]) for row in maze.make_rows(split)]
        for split in ("train", "val")
    }


@pytest.mark.slow
def test_starts_lie_as_far_from_the_goal_as_is_said(rows) -> None:
    for split, starts in rows.items():
        counts = Counter(steps_between(start) for start in starts)
        assert counts.keys() == {3, 4, 5} and min(counts.values()) > len(starts) / 6
        assert {len(start.walls) for start in starts} == {2, 3, 4}
        said = [row["answer"] for row in maze.make_rows(split)[:50]]
        assert said == [str(steps_between(start)) for start in starts[:50]]


def test_right_moves_are_those_that_shorten_the_path(rows) -> None:
    for start in rows["val"]:
        there = steps_between(start)
        assert there is not None
        expected = [
            move for move in maze.MOVES if (steps_between(start.after(move)) or 0) == there - 1
        ]
        assert start.right_moves() == expected != []


def test_walls_and_the_rim_stop_the_agent() -> None:
    start = Position.of_text(WALLED)
    assert [start.after(move).agent for move in ("up", "left", "right", "down")] == [
        (0, 0),
        (0, 0),
        (0, 0),
        (1, 0),
    ]
    assert start.right_moves() == ["down"]
    assert start.answer("down") == "00>22 d \\boxed{down}"


def test_no_layout_is_on_both_sides_of_the_split(rows) -> None:
    layouts = {split: {start.walls for start in starts} for split, starts in rows.items()}
    assert not layouts["train"] & layouts["val"]
    every = [
        set(walls)
        for n in (2, 3, 4)
        for walls in itertools.combinations(itertools.product(range(4), repeat=2), n)
    ]
    assert sum(map(maze.held_out, every)) / len(every) == pytest.approx(1 / 8, abs=0.02)
    assert all(len(set(map(str, starts))) == maze.N_ROWS[split] for split, starts in rows.items())


def read(picture: np.ndarray) -> str:
    """The maze that a picture shows, from the middles of its cells."""
    signs = {
        maze.COLOURS[name]: sign
        for name, sign in (("ground", "."), ("wall", "#"), ("agent", "A"), ("goal", "G"))
    }
    assert picture.shape == (32, 32, 3) and picture.dtype == np.uint8
    return "/".join(
        "".join(signs[tuple(map(int, cell))] for cell in line) for line in picture[4::8, 4::8]
    )


def test_every_turn_shows_where_the_agent_is(rows) -> None:
    for number, start in enumerate(rows["val"][:40]):
        env = new_env(number)
        (message,) = env.start(problem(str(start)))
        for turn in range(MAX_TURNS):
            assert read(message["content"][0]["image"]) == str(env.position)
            assert [part["type"] for part in message["content"]] == (
                ["image"] if turn else ["image", "text"]
            )
            result = env.step(f"\\boxed{{{env.position.right_moves()[0]}}}")
            if result.done:
                assert not result.messages
                break
            (message,) = result.messages


def test_the_controls_hide_what_they_should() -> None:
    shown = {}
    for control in ("every", "none", "first", "first_repeated"):
        env = new_env(shown=control)
        messages = env.start(problem(WALLED))
        while len(messages) < 4:
            messages += env.step("\\boxed{down}").messages
        pictures = [message["content"][0]["image"] for message in messages]
        shown[control] = [None if (p == maze.BLANK).all() else read(p) for p in pictures]
    assert len(set(shown["every"])) > 1
    assert shown["none"] == [None] * 4
    assert shown["first"] == [WALLED, None, None, None]
    assert shown["first_repeated"] == [WALLED] * 4
    with pytest.raises(ValueError, match="'last' is none of every, none"):
        new_env(shown="last")


def walk(seed: int, answers: list[str], start: str = WALLED) -> list:
    env = new_env(seed)
    env.start(problem(start))
    results = []
    for answer in answers:
        results.append(env.step(answer))
        if results[-1].done:
            break
    env.close()
    return results


@pytest.mark.slow
def test_slips_follow_the_seed_and_have_the_stated_frequency() -> None:
    answers = ["\\boxed{down}"] * MAX_TURNS

    def states(seed: int) -> list[str]:
        return [result.info["state"] for result in walk(seed, answers)]

    assert states(3) == states(3)
    assert len({tuple(states(seed)) for seed in range(40)}) > 3
    # a slip is drawn among four moves, one of which is the one that was asked for
    went = [
        walk(seed, ["\\boxed{right}", "\\boxed{up}"], "..../.A../..../...G")[1].info["state"]
        for seed in range(4000)
    ]
    slipped = sum(state != "..../..A./..../...G" for state in went) / len(went)
    assert slipped == pytest.approx(maze.SLIP * 3 / 4, abs=0.015)


@pytest.fixture
def steady(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(maze, "SLIP", 0.0)


def test_reward_metrics_and_states_of_an_episode(steady: None) -> None:
    results = walk(
        0, [f"\\boxed{{{move}}}" for move in ("up", "down", "down", "down", "up", "down")]
    )
    assert [result.done for result in results] == [False] * 5 + [True]
    assert [result.reward for result in results] == [0.0] * 5 + [-1.0]
    assert [result.info["state"].index("A") for result in results] == [0, 0, 5, 10, 15, 10]
    assert results[-1].info["metrics"] == {"success": 0.0, "turns": 6.0, "bumps": 1.0}
    assert results[-1].info["correct"] is False
    (result,) = walk(0, ["the way is \\boxed{up}, no: \\boxed{left}"], "..../..../..GA/....")
    assert result.done and result.reward == 1.0 and result.info["correct"] is True
    assert result.info["metrics"] == {"success": 1.0, "turns": 1.0, "bumps": 0.0}


def test_an_episode_that_is_over_takes_no_step() -> None:
    env = new_env()
    for _ in range(2):
        with pytest.raises(RuntimeError, match="without start"):
            env.step("\\boxed{up}")
        env.start(problem(WALLED))
        while not env.step("").done:
            pass


@pytest.mark.parametrize(
    "response", ["", "left", "\\boxed{}", "\\boxed{left", "\\boxed{sideways}", "\x00" * 1000]
)
def test_a_response_without_a_move_costs_a_turn(response: str) -> None:
    results = walk(0, [response] * MAX_TURNS)
    assert [result.info["state"] for result in results] == [WALLED] * MAX_TURNS
    assert results[-1].done and results[-1].info["metrics"] == {
        "success": 0.0,
        "turns": 6.0,
        "bumps": 0.0,
    }


@pytest.mark.parametrize(
    "text", ["", "A", "A..G", WALLED.replace("A", "."), WALLED.replace("G", "A"), WALLED + "/...."]
)
def test_a_text_that_is_no_maze_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="is not 4 lines of 4 signs"):
        new_env().start(problem(text))


def test_demonstrations_describe_what_they_see_and_move_away_as_often_as_is_said() -> None:
    rng = np.random.default_rng(0)
    counts: Counter[bool] = Counter()
    for _ in range(400):
        (messages,) = maze.demonstrate(rng)
        assert [message["role"] for message in messages] == ["user", "assistant"] * (
            len(messages) // 2
        )
        assert len(messages) <= 2 * MAX_TURNS
        for seen, answer in zip(messages[::2], messages[1::2], strict=True):
            position = Position.of_text(read(seen["content"][0]["image"]))
            assert not maze.held_out(position.walls)
            move = answer["content"].removesuffix("}").rpartition("{")[2]
            assert answer["content"] == position.answer(move)
            counts[move in position.right_moves()] += 1
    # where opposite moves lead to the goal alike, reversing one changes nothing
    assert counts[False] / counts.total() == pytest.approx(maze.FLIP_PROBABILITY, abs=0.04)


def test_the_warm_start_sees_the_ids_that_an_episode_has(tmp_path) -> None:
    build_toy_checkpoint(tmp_path, progress=False, toy="toy-maze", steps=0)
    processor = Processor(tmp_path, family_of("qwen3_vl"))
    renderer = Renderer(processor)
    tokenizer = processor.tokenizer
    rng = stream()
    for sequence in demonstrated_sequences(maze.TOY, tmp_path, 3, stream()):
        (messages,) = maze.demonstrate(rng)
        said = [observe((message,), problem(WALLED)) for message in messages[::2]]
        answers = [message["content"] for message in messages[1::2]]
        stop = list(processor.stop_ids)[:1]
        sampled = [
            np.array(tokenizer(text, add_special_tokens=False)["input_ids"] + stop)
            for text in answers
        ]
        expected, _ = renderer.prompt(said[0].messages, said[0].images)
        for turn in range(len(answers)):
            if turn:
                heard = list(zip(sampled[:turn], said[1 : turn + 1], strict=True))
                expected, _ = renderer.follow(expected, said[0], heard)
            expected = np.concatenate([expected, sampled[turn]])
        assert sequence.ids.tolist() == expected.tolist()
        told = tokenizer.decode(sequence.ids[sequence.loss_mask])
        assert told == "".join(f"{answer}<|im_end|>" for answer in answers)
        assert [grid for _, grid in sequence.images] == [(1, 4, 4)] * len(said)
    assert tokenizer.tokenize("31>12 ul \\boxed{left}") == [
        *"31>12",
        "Ġ",
        "u",
        "l",
        "Ġ\\",
        "boxed",
        "{left",
        "}",
    ]


def stream() -> np.random.Generator:
    return np.random.default_rng(5)
