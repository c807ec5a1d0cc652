"""Thoughts: which tokens they are, what the template is told of them, and their budget, on the real engine."""

from collections import Counter

import numpy as np
import pytest
from accounting import assert_scored_alike
from episodes import message_of
from thinking import OPENS, TURNS, assert_pieces, thinking

from rlinf_vl.errors import ConfigError
from rlinf_vl.observe.metrics import summarize_rollout
from rlinf_vl.observe.trajectories import layout
from rlinf_vl.rollout.episode.renderer import Renderer
from rlinf_vl.types import GroupSummary

KNOWS = (
    TURNS
    + "{% if enable_thinking is defined and not enable_thinking %}<think>\n\n</think>\n\n{% endif %}"
)
KEEPS = OPENS.replace(
    "{{ m.role }}\n", "{{ m.role }}\n{% if m.role == 'assistant' %}<think>\n{% endif %}"
)
OPENS_IF_TOLD = TURNS + "<think>\n{% if enable_thinking is false %}\n</think>\n\n{% endif %}"


def letters(toy, text):
    """Ids of a text by its characters."""
    return np.array(
        [
            i
            for c in text
            for i in toy.processor.tokenizer(c, add_special_tokens=False)["input_ids"]
        ],
        np.int32,
    )


@pytest.mark.parametrize(
    ("template", "answer", "thought", "open_at", "says"),
    [
        (TURNS, "What", "", None, "What"),
        (TURNS, "<think>a</think>\n\nWhat", "<think>a</think>", None, "What"),
        (TURNS, "a</think>b</think>What", "a</think>b</think>", None, "What"),
        (TURNS, "so <think>a", "so <think>a", 3, ""),
        (TURNS, "<think>a</think>b<think>c", "<think>a</think>b<think>c", 17, ""),
        (OPENS, "What", "What", 0, ""),
        (OPENS, "a</think>What", "a</think>", None, "What"),
        (OPENS, "", "", 0, ""),
        (TURNS, "", "", None, ""),
    ],
)  # fmt: skip
def test_what_is_thought_and_what_is_said(
    toy, monkeypatch, template, answer, thought, open_at, says
):
    monkeypatch.setattr(toy.processor.tokenizer, "chat_template", template)
    found = Renderer(toy.processor).thoughts(letters(toy, answer))
    assert (found.tokens, found.open, found.reply) == (len(thought), open_at, says)


def test_a_token_that_ends_thoughts_and_begins_what_is_said(toy, monkeypatch):
    monkeypatch.setattr("rlinf_vl.rollout.episode.renderer.END_THINK", "ha")
    # "Wh", "at".
    whole = np.array(
        toy.processor.tokenizer("What", add_special_tokens=False)["input_ids"], np.int32
    )
    found = Renderer(toy.processor).thoughts(np.concatenate([letters(toy, "xx"), whole]))
    assert (found.tokens, found.reply) == (2 + len(whole), "t")


@pytest.mark.parametrize(
    ("template", "mode", "ends"),
    [(KNOWS, "off", "</think>"), (KNOWS, "on", "assistant"), (KNOWS, "auto", "assistant"), (OPENS, "on", "<think>"),
     (OPENS_IF_TOLD, "off", "</think>"), (OPENS_IF_TOLD, "auto", "<think>")],
)  # fmt: skip
def test_the_template_is_told(toy, monkeypatch, template, mode, ends):
    monkeypatch.setattr(toy.processor.tokenizer, "chat_template", template)
    ids, _ = Renderer(toy.processor, mode).prompt([message_of("What")], [])
    assert toy.processor.tokenizer.decode(ids).rstrip().endswith(ends)


def test_further_variables_reach_every_prompt_of_a_template_that_names_them(toy, monkeypatch):
    template = "{{ effort }}" + TURNS
    monkeypatch.setattr(toy.processor.tokenizer, "chat_template", template)
    renderer = Renderer(toy.processor, "auto", {"effort": "low"})
    ids, _ = renderer.prompt([message_of("What")], [])
    assert toy.processor.tokenizer.decode(ids).startswith("low")
    with pytest.raises(ConfigError, match="has no variable 'eff'; leave it out"):
        Renderer(toy.processor, "auto", {"eff": "low"})


@pytest.mark.parametrize(("template", "mode"), [(TURNS, "on"), (TURNS, "off"), (OPENS, "off")])
def test_a_template_that_does_not_know_is_not_told(toy, monkeypatch, template, mode):
    monkeypatch.setattr(toy.processor.tokenizer, "chat_template", template)
    with pytest.raises(
        ConfigError, match=f"rollout.thinking.mode: {mode}, but the .* doesn't know enable_thinking"
    ):
        Renderer(toy.processor, mode)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("template", "budget", "turns"), [(OPENS, 1, 1), (OPENS, 5, 1), (OPENS, 5, 3), (KEEPS, 5, 3)]
)
def test_a_thought_that_has_used_its_budget_is_closed_and_the_answer_goes_on(
    toy, monkeypatch, template, budget, turns
):
    """Also where the template shows earlier thoughts as they stand, closed ones included: then the conversation is one sequence."""
    monkeypatch.setattr(toy.processor.tokenizer, "chat_template", template)
    groups, asked, replies = thinking(toy, budget, turns, longest=40)
    assert_pieces(toy, groups, asked, budget, 40)
    trajectories = [t for group in groups for t in group.trajectories]
    assert {len(t.sequences) for t in trajectories} == {turns if template == OPENS else 1}
    closed = [turn for t in trajectories for turn in t.turn_thoughts if turn[2]]
    assert len(closed) > 3 * turns and all(thought == budget for thought, _, _ in closed)
    assert any(behind > 5 for _, behind, _ in closed), "the answer goes on"
    nonempty_replies = [r for r in replies if r]
    assert nonempty_replies and not any("think" in response for response in replies)
    assert_scored_alike(toy, groups)
    metrics = summarize_rollout(
        [GroupSummary.of(g, toy.processor.image_token_id) for g in groups], 1.0
    )
    all_turns = [turn for t in trajectories for turn in t.turn_thoughts]
    assert metrics["rollout/thoughts_closed"] == pytest.approx(len(closed) / len(all_turns))
    assert metrics["rollout/thought_length_mean"] == pytest.approx(
        np.mean([thought for thought, _, _ in all_turns])
    )
    sampled = metrics["rollout/thought_length_mean"] + metrics["rollout/answer_length_mean"]
    assert sampled * len(all_turns) == pytest.approx(sum(t.n_response_tokens for t in trajectories))
    shown = layout(trajectories[0], groups[0].prefix_length, None)["turns"][0]
    assert shown["thought"] - shown["start"] == trajectories[0].turns[0].thought > 0


def test_an_answer_without_thoughts_is_drawn_whole_behind_its_first_piece(toy, monkeypatch):
    monkeypatch.setattr(toy.processor.tokenizer, "chat_template", TURNS)
    groups, asked, _ = thinking(toy, 4, 1, longest=30)
    assert_pieces(toy, groups, asked, 4, 30)
    whole = [t for group in groups for t in group.trajectories]
    assert all(turn[0] == turn[2] == 0 for t in whole for turn in t.turn_thoughts)
    assert max(t.n_response_tokens for t in whole) > 4
    assert "rollout/thought_length_mean" not in summarize_rollout(
        [GroupSummary.of(g, 0) for g in groups], 1.0
    )


@pytest.mark.slow
def test_a_second_thought_has_a_budget_too(toy, monkeypatch):
    """It stops where the thought begins, and again when that has used its budget."""
    tokenizer = toy.processor.tokenizer
    monkeypatch.setattr(tokenizer, "chat_template", TURNS)

    def answers(budget):
        groups, _, _ = thinking(toy, budget, 1, longest=150, temperature=5.0)
        return [
            t.sequences[0].ids[t.turns[0].start : t.turns[0].end].tolist()
            for g in groups
            for t in g.trajectories
        ]

    ((begin, _), *_) = Counter(
        i for answer in answers(None) for i in answer if i not in toy.processor.stop_ids
    ).most_common()
    monkeypatch.setattr(
        "rlinf_vl.rollout.episode.renderer.THINK", tokenizer.convert_ids_to_tokens(begin)
    )
    closing = Renderer(toy.processor).closing.tolist()
    several = 0
    for answer in answers(3):
        begins = [i for i, token in enumerate(answer) if token == begin]
        ends = [i for i in range(len(answer)) if answer[i : i + len(closing)] == closing]
        several += len(ends) > 1
        for end in ends:
            assert any(end - 3 <= i < end for i in begins)
        for i in begins:  # nothing is thought for longer than three tokens
            assert any(i < end <= i + 3 for end in ends) or i + 3 > len(answer) - 1 - len(closing)
    assert several, "no answer has thought twice"


def test_an_open_thought_is_no_answer(toy, monkeypatch):
    monkeypatch.setattr(toy.processor.tokenizer, "chat_template", OPENS)
    groups, _, replies = thinking(toy, None, 1, longest=8)
    assert set(replies) == {""}
    metrics = summarize_rollout([GroupSummary.of(g, 0) for g in groups], 1.0)
    assert metrics["rollout/unanswered"] == 1 and metrics["rollout/answer_length_mean"] == 0


def test_a_thought_that_was_cut_is_closed_in_the_history(toy, monkeypatch):
    monkeypatch.setattr(toy.processor.tokenizer, "chat_template", KEEPS)
    groups, _, _ = thinking(toy, None, 2, longest=6)
    closing, cut = Renderer(toy.processor).closing, 0
    for t in (t for group in groups for t in group.trajectories):
        (sequence,), (first, second) = t.sequences, t.turns
        between = sequence.ids[first.end : second.start]
        closed = between[: len(closing)].tolist() == closing.tolist()
        assert (
            closed == (first.finish_reason == "length")
            and not sequence.loss_mask[first.end : second.start].any()
        )
        cut += closed
    assert cut
