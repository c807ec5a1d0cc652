"""Rows whole: calls, thoughts, results and tools of conversations, in prompts and in what is imitated."""

import json
import re

import numpy as np
import pytest
from chat_templates import TEMPLATES
from episodes import Maker, encoded, make_player, message_of, picture, play
from scripted_engine import Scripted

from rlinf_vl.data.formats import RowFormat
from rlinf_vl.data.rows import row_to_problem
from rlinf_vl.data.unusable import RowError
from rlinf_vl.envs import StepResult
from rlinf_vl.extras.sft.demonstrations import imitated_trajectory
from rlinf_vl.models.families import family_of
from rlinf_vl.models.processing import Processor
from rlinf_vl.rollout.episode.renderer import Renderer
from rlinf_vl.rollout.episode.request_builder import RequestBuilder
from rlinf_vl.types import SamplingParams

PICTURE = encoded(picture(48, 32, 9)).data
TOOLS = [
    {"name": "look", "parameters": {"type": "object", "properties": {"n": {"type": "integer"}}}}
]
CALL = {"id": "call00000", "function": {"name": "look", "arguments": '{"n": 12}'}}
ASKED = {
    "role": "assistant",
    "content": "I look.",
    "reasoning_content": "Hm.",
    "tool_calls": [CALL],
}
RESULT = {"role": "tool", "tool_call_id": "call00000", "name": "look", "content": "<image>here"}
ANSWER = {"role": "assistant", "content": "Three.", "reasoning_content": "One, two."}
TALK = [{"role": "user", "content": "How many?"}, ASKED, RESULT, ANSWER]
#: Families whose templates show all of that, thoughts of the turn included.
WHOLE = ["qwen3", "hermes", "qwen3_5", "qwen3_6"]


def renderer_of(toy_folder, family):
    processor = Processor(toy_folder, family_of("qwen3_vl"))
    processor.tokenizer.chat_template = TEMPLATES[family][0]
    return Renderer(processor)


@pytest.fixture(scope="module")
def renderers(toy_folder):
    return {family: renderer_of(toy_folder, family) for family in TEMPLATES}


def problem_of(messages, imitates=True, **columns):
    form = RowFormat(messages_key="messages" if imitates else None, format="openai")
    row = {"messages": messages, "images": [{"bytes": PICTURE}], "tools": TOOLS, "answer": "3"}
    row |= columns
    return row_to_problem(row, "rows:1", form.for_columns(row))


def imitated(renderer, problem, parts=("content", "thoughts", "calls")):
    (sequence,) = imitated_trajectory(renderer, problem, parts).sequences
    return sequence


def texts_with_loss(renderer, sequence):
    """The text of each run of tokens with loss."""
    edges = np.flatnonzero(np.diff(np.concatenate([[0], sequence.loss_mask, [0]])))
    runs = [sequence.ids[a:b] for a, b in edges.reshape(-1, 2)]
    return [renderer.processor.tokenizer.decode(run) for run in runs]


@pytest.mark.parametrize("family", WHOLE)
def test_calls_and_thoughts_are_imitated_and_results_never(renderers, family):
    renderer = renderers[family]
    problem = problem_of(TALK)
    sequence = imitated(renderer, problem)
    first, last = texts_with_loss(renderer, sequence)
    call = renderer.words.calls.write([("look", {"n": 12})])
    assert first.startswith("<think>\nHm.\n</think>\n\nI look.") and first.endswith(
        f"{call}<|im_end|>"
    )
    assert last == "<think>\nOne, two.\n</think>\n\nThree.<|im_end|>"
    # All tokens are those of the template's own rendering.
    plain = [m | {"content": m["content"].replace("<image>", "")} for m in TALK]
    plain[1] = ASKED | {"tool_calls": [{"function": {"name": "look", "arguments": {"n": 12}}}]}
    plain[2]["content"] = [{"type": "image"}, {"type": "text", "text": "here"}]
    tokenizer = renderer.processor.tokenizer
    rendered = tokenizer.apply_chat_template(plain, tools=list(problem.tools), tokenize=False)
    whole = re.sub(r"(<\|image_pad\|>)+", "<|image_pad|>", tokenizer.decode(sequence.ids))
    assert rendered.startswith(whole) and rendered[len(whole) :].strip() == ""
    assert '"name": "look"' in whole and len(sequence.images) == 1


def test_thoughts_in_the_content_are_those_of_the_field(renderers):
    apart = [m for m in TALK]
    joined = [
        {k: v for k, v in m.items() if k != "reasoning_content"}
        | (
            {"content": f"<think>\n{m['reasoning_content']}\n</think>\n\n{m['content']}"}
            if "reasoning_content" in m
            else {}
        )
        for m in TALK
    ]
    for family in WHOLE:
        sequences = [imitated(renderers[family], problem_of(talk)) for talk in (apart, joined)]
        assert np.array_equal(sequences[0].ids, sequences[1].ids)
        assert np.array_equal(sequences[0].loss_mask, sequences[1].loss_mask)


def test_an_answer_is_imitated_behind_a_thought_that_the_prompt_opens(toy_folder):
    opens = TEMPLATES["qwen3_5"][0].removesuffix("{%- endif -%}") + "{{ '<think>\n' }}{%- endif -%}"
    processor = Processor(toy_folder, family_of("qwen3_vl"))
    processor.tokenizer.chat_template = opens
    renderer = Renderer(processor)
    assert renderer.begins_with_thoughts
    texts = texts_with_loss(renderer, imitated(renderer, problem_of(TALK)))
    assert texts[0].startswith("Hm.\n</think>\n\nI look.")
    assert texts[1] == "One, two.\n</think>\n\nThree.<|im_end|>"
    content = texts_with_loss(renderer, imitated(renderer, problem_of(TALK), ["content"]))
    assert [text.strip() for text in content] == ["I look.", "Three.<|im_end|>"]


@pytest.mark.parametrize("family", WHOLE)
def test_parts_with_loss_are_chosen(renderers, family):
    renderer, problem = renderers[family], problem_of(TALK)
    whole = imitated(renderer, problem)
    call = renderer.words.calls.write([("look", {"n": 12})])
    expected = {
        "thoughts": ["<think>\nHm.\n</think>", "<think>\nOne, two.\n</think>"],
        "content": ["I look.", "Three.<|im_end|>"],
        "calls": [f"{call}<|im_end|>"],
    }
    total = np.zeros(len(whole.ids), int)
    for part, texts in expected.items():
        sequence = imitated(renderer, problem, [part])
        assert [text.strip() for text in texts_with_loss(renderer, sequence)] == texts
        assert np.array_equal(sequence.ids, whole.ids)
        total += sequence.loss_mask
    # Each token belongs to one part.
    assert np.array_equal(total, whole.loss_mask.astype(int))
    plain = problem_of([TALK[0], {"role": "assistant", "content": "Three."}], images=[])
    with pytest.raises(RowError, match=r"data\.imitate: the answers to imitate have no calls"):
        imitated(renderer, plain, ["calls"])


def test_what_the_template_does_not_show_is_refused_by_name(renderers):
    cases = {
        "internvl": "message 2 has tool_calls, which the checkpoint's chat template does not show",
        "qwen3_vl": "message 2 has reasoning_content, which the checkpoint's",
        "deepseek": "row rows:1: ",
    }
    for family, reason in cases.items():
        with pytest.raises(RowError, match=reason):
            imitated(renderers[family], problem_of(TALK))
    no_results = TEMPLATES["qwen3"][0].replace("m.role == 'tool'", "m.role == 'none'")
    no_results = no_results.replace(
        "{%- else -%}{{ '<|im_start|>'", "{%- elif m.role != 'tool' -%}{{ '<|im_start|>'"
    )
    renderer = renderers["qwen3"]
    processor = Processor(renderer.processor._path, family_of("qwen3_vl"))
    processor.tokenizer.chat_template = no_results
    with pytest.raises(RowError, match="message 3 has the role 'tool', which"):
        imitated(Renderer(processor), problem_of(TALK))


def test_thoughts_that_the_template_drops_once_the_talk_goes_on_are_refused(renderers):
    talk = [*TALK, {"role": "user", "content": "Sure?"}, ANSWER]
    with pytest.raises(
        RowError, match="in another way once the conversation goes on|changes message"
    ):
        imitated(renderers["qwen3_5"], problem_of(talk))
    # A template that keeps them is given all, and so is one with the earlier answers as context.
    assert (
        len(texts_with_loss(renderers["qwen3_6"], imitated(renderers["qwen3_6"], problem_of(talk))))
        == 3
    )
    context = [m | {"weight": 0} if m["role"] == "assistant" else m for m in TALK] + talk[4:]
    (last,) = texts_with_loss(
        renderers["qwen3_5"], imitated(renderers["qwen3_5"], problem_of(context))
    )
    assert last == "<think>\nOne, two.\n</think>\n\nThree.<|im_end|>"


def test_a_prompt_shows_calls_results_and_tools(renderers):
    renderer = renderers["qwen3_5"]
    builder = RequestBuilder(renderer, 4000, 4000)
    problem = problem_of(TALK[:3], imitates=False)
    assert problem.tools[0]["function"]["name"] == "look" and problem.messages[2]["name"] == "look"
    request = builder.from_row(problem)
    text = renderer.processor.tokenizer.decode(request.ids)
    assert '"name": "look"' in text and "<function=look>\n<parameter=n>\n12\n" in text
    assert text.rstrip().endswith("<|im_start|>assistant") and len(request.images) == 1
    with pytest.raises(RowError, match="message 2 has tool_calls, which"):
        RequestBuilder(renderers["internvl"], 4000, 4000).from_row(problem)


def test_fields_of_tables_are_read_and_malformed_ones_named():
    def fields(**message):
        talk = [TALK[0], {"role": "assistant", "content": "x"} | message]
        return problem_of(talk, images=[]).messages[1]

    # Tables fill in the keys of other rows with None.
    call = {
        "id": None,
        "type": None,
        "function": {"name": "look", "arguments": {"n": 1, "m": None}},
    }
    plain = {"name": "look", "arguments": {"n": 1}}
    assert fields(tool_calls=[call], content=None)["tool_calls"] == [
        {"type": "function", "function": plain}
    ]
    kept = fields(tool_calls=json.dumps([{"name": "look", "arguments": '{"n": null}'}]))
    assert kept["tool_calls"][0]["function"]["arguments"] == {"n": None}
    assert fields(thinking="so")["reasoning_content"] == "so"
    assert "tool_calls" not in fields(tool_calls=[], reasoning=None)
    for message, reason in (
        ({"tool_calls": [{"id": "a"}]}, "'tool_calls': .* has no function with a name"),
        ({"tool_calls": [{"name": "f", "arguments": "{"}]}, "'tool_calls': '{' is no JSON"),
        (
            {"tool_calls": [{"name": "f", "arguments": "[1]"}]},
            r"'tool_calls': the arguments \[1\] are no mapping",
        ),
        ({"tool_calls": 3}, "'tool_calls': 3 is no list"),
        ({"function_call": {"name": "f"}}, "'function_call', which is not supported"),
        ({"reasoning_content": 3}, "'reasoning_content': 3 is no text"),
        ({"reasoning_content": "a", "thinking": "b"}, "'thinking' beside other thoughts"),
    ):
        with pytest.raises(RowError, match=f"a message of role 'assistant' has {reason}"):
            fields(**message)
    with pytest.raises(RowError, match="role 'user' has 'tool_calls', which only the assistant's"):
        problem_of([{"role": "user", "content": "a", "tool_calls": [CALL]}, ANSWER])


def test_tools_are_read_in_every_form_and_other_columns_stay_columns():
    def tools(value, imitates=True):
        messages = [TALK[0], {"role": "assistant", "content": "x"}][: 2 if imitates else 1]
        return problem_of(messages, imitates, images=[], tools=value).tools

    whole = tools([{"type": "function", "function": TOOLS[0]}])
    assert whole == tools(TOOLS) == tools(json.dumps(TOOLS)) == tools([json.dumps(TOOLS[0])])
    filled = [
        TOOLS[0] | {"strict": None, "parameters": TOOLS[0]["parameters"] | {"required": None}}
    ]
    assert tools(filled) == whole and tools(None) == tools([]) == ()
    for value in ("hammer", ["hammer"], 3):
        assert tools(value, imitates=False) == ()
        with pytest.raises(RowError, match="column 'tools'"):
            tools(value)
    with pytest.raises(RowError, match="column 'tools': .* has no function with a name"):
        tools([{"type": "function"}], imitates=False)


class TwoTurns:
    def __init__(self):
        self.turns = 0

    def start(self, problem):
        return list(problem.messages)

    def step(self, response):
        self.turns += 1
        return StepResult([message_of("again")] * (self.turns < 2), 1.0, self.turns == 2)

    def close(self):
        pass


def test_an_episode_begins_with_the_calls_and_tools_of_its_row(renderers):
    processor = renderers["qwen3_vl"].processor
    talk = [TALK[0], {k: v for k, v in ASKED.items() if k != "reasoning_content"}, RESULT]
    problem = problem_of(talk, imitates=False)
    limits = {"seq_length": 4000, "max_prompt_length": 2000}
    engine = Scripted(processor, ["18"])
    player = make_player(engine, processor, Maker(lambda seed: TwoTurns()), **limits)
    sampling = SamplingParams(max_new_tokens=20, stop_ids=processor.stop_ids)
    (group,) = play(player, [[1]], sampling, problem)
    (trajectory,) = group.trajectories
    assert trajectory.error is None and len(trajectory.turns) == 2
    (sequence,) = trajectory.sequences
    prompt = RequestBuilder(renderers["qwen3_vl"], 4000, 4000).from_row(problem).ids
    assert np.array_equal(sequence.ids[: len(prompt)], prompt)
    assert "<tool_call>" in processor.tokenizer.decode(prompt)
