"""What is too long: prompts cut to what fits, at whole images, observations to what there is room for, and errors with numbers."""

import asyncio
import json
import random
from collections import Counter
from dataclasses import replace
from functools import partial

import numpy as np
import pytest
from accounting import assert_scored_alike
from episodes import Maker, encoded, make_player, message_of, picture, play

from rlinf_vl.config import load_config
from rlinf_vl.data.unusable import PROMPT_TOO_LONG, RowError
from rlinf_vl.envs import StepResult
from rlinf_vl.rollout.episode.observation import Observation
from rlinf_vl.rollout.episode.renderer import Renderer
from rlinf_vl.rollout.episode.request_builder import cut
from rlinf_vl.rollout.pool.worker import RolloutRank
from rlinf_vl.types import Problem, SamplingParams

PICTURES = [
    encoded(picture(*size, n))
    for n, size in enumerate([(48, 48), (96, 48), (32, 64), (64, 96), (32, 32)])
]


def image(n):
    return {"type": "image_url", "image_url": {"url": PICTURES[n].url}}


def text(words):
    return {"type": "text", "text": words}


def message(role, *parts):
    return {"role": role, "content": list(parts)}


def shown(*messages):
    urls = {p.url: p for p in PICTURES}
    parts = [part for m in messages for part in m["content"] if isinstance(part, dict)]
    return Observation(
        messages, tuple(urls[p["image_url"]["url"]] for p in parts if "image_url" in p)
    )


@pytest.fixture(scope="module")
def renderer(toy):
    return Renderer(toy.processor)


def length(renderer, conversation):
    return len(renderer.prompt(conversation.messages, conversation.images)[0])


def drawn(seed):
    """A conversation of one to four questions, with or without a system message, of texts and pictures in any order."""
    draw = random.Random(seed)
    messages = [message("system", text("Find x."))] if draw.random() < 0.5 else []
    for turn in range(draw.randint(1, 4)):
        parts = [image(draw.randrange(5)) for _ in range(draw.randint(0, 3))]
        parts += [
            text("".join(draw.choices(("What ", "is ", "x", " = 18", "é "), k=draw.randint(1, 12))))
            for _ in range(2)
        ]
        draw.shuffle(parts)
        messages += [{"role": "assistant", "content": "It is 18."}] if turn else []
        messages.append(message("user", *parts))
    return shown(*messages)


@pytest.mark.parametrize("seed", range(25))
def test_what_is_cut_is_the_longest_end_that_fits_with_whole_images_and_turns(renderer, toy, seed):
    whole = drawn(seed)
    total, tokenizer = length(renderer, whole), toy.processor.tokenizer
    least = shown(*(m for m in whole.messages if m["role"] == "system"), message("user", text("x")))
    for limit in np.linspace(length(renderer, least) + 20, total - 1, 4).astype(int).tolist():
        left = cut(whole, lambda c, limit=limit: length(renderer, c) <= limit, ("user",))
        if left is None:
            assert whole.messages[-1]["content"][-1].get("type") == "image_url"
            continue
        ids, grids = renderer.prompt(left.messages, left.images)
        assert limit - toy.processor.image_tokens(grids).max(initial=12) - 30 < len(ids) <= limit
        assert (ids == toy.processor.image_token_id).sum() == toy.processor.image_tokens(
            grids
        ).sum()
        assert left.images == whole.images[len(whole.images) - len(left.images) :]
        decoded, roles = tokenizer.decode(ids), [m["role"] for m in left.messages]
        assert decoded.count("<|im_start|>") == len(roles) + 1 and decoded.count(
            "<|im_end|>"
        ) == len(roles)
        assert decoded.endswith("<|im_start|>assistant\n")
        had_system = whole.messages[0]["role"] == "system"
        assert (left.messages[0] == whole.messages[0]) == had_system and roles[had_system] == "user"
        first = had_system
        kept = left.messages[first + 1 :]
        assert kept == whole.messages[len(whole.messages) - len(kept) :]
        was, now = (
            whole.messages[len(whole.messages) - len(kept) - 1]["content"],
            left.messages[first]["content"],
        )
        assert now[1:] == was[len(was) - len(now) + 1 :]
        before = was[len(was) - len(now)]
        assert now[0] == before or before["text"].endswith(now[0]["text"])


def test_a_text_is_cut_to_the_last_token_that_fits(renderer):
    whole = shown({"role": "user", "content": "x = 3 What is x? " * 20})
    for limit in (40, 41, 42):
        left = cut(whole, lambda c, limit=limit: length(renderer, c) <= limit, ("user",))
        assert left is not None and length(renderer, left) == limit
        assert isinstance(left.messages[0]["content"], str)


def test_what_may_not_be_cut_is_too_long(renderer):
    rules = message("system", text("Find x. " * 30))
    assert (
        cut(
            shown(rules, message("user", text("What"))),
            lambda c: length(renderer, c) <= 40,
            ("user",),
        )
        is None
    )
    assert (
        cut(shown(message("user", image(3))), lambda c: length(renderer, c) <= 12, ("user",))
        is None
    )


class Asks:
    """Says what its problem says, then an observation after each answer."""

    def __init__(self, *observations):
        self.observations = list(observations)

    def start(self, problem):
        return list(problem.messages)

    def step(self, response):
        return (
            StepResult([self.observations.pop(0)], 1.0, False)
            if self.observations
            else StepResult((), 1.0, True)
        )

    def close(self):
        pass


def player_of(toy, *observations, **changed):
    fields = {
        "seq_length": 300,
        "max_prompt_length": 60,
        "overlong": "cut",
    }
    return make_player(
        toy.engine, toy.processor, Maker(lambda seed: Asks(*observations)), **(fields | changed)
    )


def problem_of(conversation):
    return Problem("p:7", conversation.messages, "18", conversation.images)


def sampling(toy, n=8):
    return SamplingParams(temperature=1.5, max_new_tokens=n, stop_ids=toy.processor.stop_ids)


LONG = shown(
    message("system", text("Find x.")), message("user", image(1), text("x = 3")), {"role": "assistant", "content": "18"},
    message("user", image(0), image(3), text("What is x? " * 3), image(2), text("What?")),
)  # fmt: skip


def test_a_cut_prompt_is_played_and_trained_as_it_is_shown(toy, renderer):
    """Also in the later turns, in which the history is what is left of it."""
    (group,) = play(
        player_of(toy, message_of("x = 3")), [range(4)], sampling(toy), problem_of(LONG)
    )
    for t in group.trajectories:
        assert (t.error, t.cuts, len(t.turns)) == (None, 1, 2)
        first = t.sequences[0]
        assert 30 < t.turns[0].start <= 60 and [i for i, _ in first.images] == [PICTURES[2]]
        for sequence in t.sequences:
            toy.processor.image_tokens.assert_placed(sequence)
            assert toy.processor.tokenizer.decode(sequence.ids).count("Find x.") == 1
    assert_scored_alike(toy, [group])


@pytest.mark.parametrize("overlong", ["drop", "cut", "error"])
def test_a_prompt_at_the_limit_is_left_alone_and_one_over_it_is_not(toy, renderer, overlong):
    n = length(renderer, LONG)
    request = partial(
        player_of(toy, max_prompt_length=n, overlong=overlong).builder.from_row, problem_of(LONG)
    )
    assert len(request().ids) == n
    player = player_of(toy, max_prompt_length=n - 1, overlong=overlong)
    if overlong == "cut":
        assert len(player.builder.from_row(problem_of(LONG)).ids) < n
        return
    pattern = f"row p:7: the prompt has {n} tokens, data.max_prompt_length is {n - 1}; raise that, and runner.seq_length, or"
    with pytest.raises(RowError, match=pattern) as caught:
        player.builder.from_row(problem_of(LONG))
    assert caught.value.kind == PROMPT_TOO_LONG


def test_a_prompt_that_can_not_be_cut_is_told_with_its_numbers(toy, renderer):
    whole = shown(message("user", image(3)))
    n = length(renderer, whole)
    with pytest.raises(
        RowError,
        match=f"row p:7: the prompt has {n} tokens, .* is 12, and what may not be cut is longer, too",
    ):
        player_of(toy, max_prompt_length=12).builder.from_row(problem_of(whole))


SAYS = [
    message_of("x = 3 " * 10, picture(64, 96), "What is x? " * 6, picture(32, 32, 1), "What?")
    for _ in range(3)
]


@pytest.mark.parametrize("overlong", ["drop", "cut", "error"])
def test_an_observation_without_room(toy, renderer, overlong):
    question = shown(message("user", text("What")))
    player = player_of(toy, *SAYS, seq_length=150, overlong=overlong)
    (group,) = play(player, [range(4)], sampling(toy), problem_of(question))
    for t in group.trajectories:
        if overlong == "error":
            kind, _, reason = (t.error or "").partition(": ")
            assert (
                kind == "trajectory too long"
                and "with what answers turn" in reason
                and t.status == "error"
            )
            assert (
                "runner.seq_length is 150; raise it, lower rollout.max_turns, or set data.overlong"
                in reason
            )
            continue
        assert t.error is None and t.status == "length" and len(t.turns) >= 1
        assert t.cuts == (overlong == "cut")
        assert len(t.sequences[-1].ids) <= 150
        if overlong == "cut":  # there was room for a whole answer
            decoded = toy.processor.tokenizer.decode(t.sequences[-1].ids[: t.turns[-1].start])
            assert decoded.endswith("What?<|im_end|>\n<|im_start|>assistant\n")
            assert 150 - 8 - 12 <= t.turns[-1].start <= 150 - 8
    if overlong != "error":
        assert_scored_alike(toy, [group])


def test_a_worker_finds_what_is_cut_dropped_and_bad(toy_folder, tmp_path, toy, monkeypatch):
    rows = [
        ("What?", []),
        ("What is x? " * 30, []),
        ("<image>" * 3 + "x?", [0, 3, 1]),
        ("<image>", [3]),
        ("x", []),
    ]
    file = tmp_path / "rows.jsonl"
    for n, p in enumerate(PICTURES):
        (tmp_path / f"{n}.png").write_bytes(p.data)
    lines = [
        {"problem": words, "answer": "18", "images": [f"{n}.png" for n in numbers]}
        for words, numbers in rows
    ]
    file.write_text("".join(json.dumps(line) + "\n" for line in lines))
    rank = RolloutRank(
        load_config("toy-grpo-cpu", [f"data.train_data_paths=[{file}]", "data.val_data_paths=[]"]),
        str(toy_folder),
        "cpu",
    )
    try:
        for overlong, by_length in (
            ("drop", True),
            ("drop", False),
            ("cut", True),
            ("cut", False),
            ("error", False),
        ):
            rank.config.data.overlong, rank.config.data.filter_prompt_by_length = (
                overlong,
                by_length,
            )
            rank.config.data.max_prompt_length = 26
            rank.builder = replace(rank.builder, overlong=overlong, max_prompt_length=26)
            found, _ = asyncio.run(rank.filter_rows("train", range(5)))
            if overlong == "cut":
                assert list(found.kept) == [0, 1, 2, 4] and not found.too_long
                assert (
                    found.cut[1][1] == 0
                    and found.cut[2][1] > 0
                    and all(n > 26 for n, _ in found.cut.values())
                )
                assert found.bad[3].kind == PROMPT_TOO_LONG
                continue
            assert list(found.kept) == [0, 4] and not found.cut
            assert (list(found.too_long), list(found.bad)) == (
                ([1, 2, 3], []) if by_length or overlong == "error" else ([], [1, 2, 3])
            )
    finally:
        asyncio.run(rank.stop())


def test_messages_of_an_environment_are_cut_too(toy):
    class Long(Asks):
        def start(self, problem):
            return [message_of(picture(64, 96), "x = 3 " * 40)]

    player = player_of(toy)
    player.make_env = Maker(lambda seed: Long())
    (group,) = play(player, [range(3)], sampling(toy))
    assert Counter(t.cuts for t in group.trajectories) == {1: 3} and group.prefix_length <= 60
    assert not group.images
