"""The forms of calls, thoughts and results that are found in chat templates, and what a policy writes in them."""

import json
import unicodedata

import numpy as np
import pytest
from chat_templates import SPECIAL, TEMPLATES
from hypothesis import given, settings
from hypothesis import strategies as st

from rlinf_vl.envs.call_forms import FORMS, count_unread
from rlinf_vl.models.families import family_of
from rlinf_vl.models.processing import Processor
from rlinf_vl.rollout.episode.renderer import Renderer

KNOWN = [name for name, (_, form) in TEMPLATES.items() if form]
SCHEMA = {
    "text": {"type": "string"},
    "count": {"type": "integer"},
    "share": {"type": "number"},
    "flag": {"type": "boolean"},
    "place": {"type": "object"},
    "points": {"type": "array"},
    "maybe": {"anyOf": [{"type": "integer"}, {"type": "null"}]},
}
TOOLS = [
    {
        "type": "function",
        "function": {
            "name": name,
            "description": "A tool.",
            "parameters": {"type": "object", "properties": SCHEMA},
        },
    }
    for name in ("look", "add_up")
]


def renderer_for(toy_folder, family):
    processor = Processor(toy_folder, family_of("qwen3_vl"))
    processor.tokenizer.chat_template = TEMPLATES[family][0]
    processor.tokenizer.add_tokens(SPECIAL.get(family, []), special_tokens=True)
    return Renderer(processor)


@pytest.fixture(scope="module")
def renderers(toy_folder):
    return {family: renderer_for(toy_folder, family) for family in TEMPLATES}


@pytest.mark.parametrize("family", KNOWN)
def test_the_form_of_calls_is_found(renderers, family):
    words = renderers[family].words
    assert words.shows_calls and words.calls is not None
    assert words.calls.name.startswith(TEMPLATES[family][1])
    assert words.reply_form.require_calls() is words.calls


def test_glm_s_two_forms_differ_by_what_the_template_writes(renderers):
    names = [renderers[family].words.calls.name for family in ("glm4_5", "glm4_7")]
    assert names[1] == f"{names[0]}, in one line"


def test_a_template_without_calls_leaves_json(renderers):
    words = renderers["internvl"].words
    assert not words.shows_calls and words.calls is FORMS[0]


def test_an_unknown_form_is_refused_with_the_template_s_text(renderers):
    words = renderers["deepseek"].words
    assert words.shows_calls and words.arguments_as_text and words.calls is None
    with pytest.raises(ValueError, match=r"form that is not known: '<\|calls_begin\|>.*probe_one"):
        words.reply_form.require_calls()


def test_thoughts_and_results_are_found(renderers):
    facts = {
        family: (
            r.words.thought_marks[0],
            r.words.shows_thoughts,
            r.words.keeps_thoughts,
            r.words.shows_results,
            r.words.shows_pictures_in_results,
        )
        for family, r in renderers.items()
    }
    assert facts["qwen3_vl"] == ("<think>", False, False, True, True)
    assert facts["qwen3"] == facts["qwen3_5"] == ("<think>", True, False, True, True)
    assert facts["qwen3_6"] == ("<think>", True, True, True, True)
    assert facts["magistral"] == ("[THINK]", True, True, True, True)
    assert facts["gemma4"][:3] == ("<|channel>thought", True, True)


def normal(text):
    # The tokenizer normalizes texts itself.
    return unicodedata.normalize("NFC", text).strip()


ARGUMENTS = st.fixed_dictionaries(
    {},
    optional={
        # Line breaks at the ends belong to some forms; no form can hold its own marks in a text.
        "text": st.text(st.characters(codec="utf-8", exclude_characters="<>[]|")).map(normal),
        "count": st.integers(-(10**12), 10**12),
        "share": st.floats(-1e6, 1e6, allow_nan=False).map(lambda x: round(x, 4)),
        "flag": st.booleans(),
        "place": st.dictionaries(st.sampled_from("abc"), st.integers() | st.sampled_from("xyz")),
        "points": st.lists(st.integers() | st.sampled_from("uvw"), max_size=4),
        "maybe": st.none() | st.integers(),
    },
)
CALLS = st.lists(st.tuples(st.sampled_from(["look", "add_up"]), ARGUMENTS), min_size=1, max_size=3)


def comparable(calls):
    # Some templates write 3.0 and others 3 for a number, and keys in another order.
    return json.dumps([[name, arguments] for name, arguments in calls], sort_keys=True)


@pytest.mark.parametrize("family", KNOWN)
@settings(max_examples=200, deadline=None)
@given(calls=CALLS, content=st.sampled_from(["", "I look."]), thought=st.sampled_from(["", "Hm."]))
def test_what_the_template_writes_is_read_back(renderers, family, calls, content, thought):
    renderer, form = renderers[family], renderers[family].words.calls
    if family in ("llama4", "gemma4"):
        content = ""  # Llama leaves it out, and Gemma shows it behind the calls
    calls = calls[: 1 if family == "llama4" else None]
    message = {
        "role": "assistant",
        "content": content,
        "reasoning_content": thought,
        "tool_calls": [
            {
                "id": f"call0000{i}",
                "type": "function",
                "function": {"name": name, "arguments": arguments},
            }
            for i, (name, arguments) in enumerate(calls)
        ],
    }
    question = {"role": "user", "content": "Q"}
    head = renderer._render([question], TOOLS, add_generation_prompt=True)
    whole = renderer._render([question, message], TOOLS, add_generation_prompt=False)
    answer = whole[len(head) :] if whole.startswith(head) else whole.partition("[/INST]")[2]
    ids = renderer.encode(answer)
    text = renderer.processor.decode(ids)
    text = text.rpartition(renderer.words.thought_marks[1])[2].strip()
    read = form.read(text, TOOLS)
    assert comparable(call.named for call in read) == comparable(calls)
    assert count_unread(text, read) == 0
    assert text[: read[0].start].rstrip() == content
    # The writer's text is the template's, where templates agree on how constants look.
    if family not in ("qwen3_5", "pixtral", "lfm2_vl"):
        assert form.write(calls) in text


@pytest.mark.parametrize("form", FORMS, ids=lambda form: form.name)
def test_what_a_form_writes_it_reads(form):
    calls = [
        ("look", {"text": '12 "x"\nline é', "count": 3, "share": 0.5, "flag": False}),
        ("add_up", {"place": {"a": [1, {"b": "c"}]}, "points": [], "maybe": None}),
    ]
    read = form.read(form.write(calls), TOOLS)
    assert comparable(call.named for call in read) == comparable(calls)
    if form.prefill("look"):
        assert form.write([("look", {"text": "x"})]).startswith(form.prefill("look"))
    assert form.write([("look", {"text": "x"})]).startswith(form.prefill(None))


@pytest.mark.parametrize("form", FORMS, ids=lambda form: form.name)
@settings(max_examples=200, deadline=None)
@given(cut=st.integers(0, 400), junk=st.text(max_size=8))
def test_a_broken_call_is_counted_and_never_raises(form, cut, junk):
    whole = form.write([("look", {"text": "abc", "place": {"a": 1}}), ("add_up", {"count": 2})])
    text = whole[: cut % len(whole)] + junk
    read = form.read(text, TOOLS)
    assert all(0 <= call.start <= call.end <= len(text) for call in read)
    assert all((call.error is None) == (call.value is not None) for call in read)
    opened = bool(form.marks) and form.marks[0] in text
    if opened and not any(call.error is None for call in read):
        assert count_unread(text, read) >= 1


def test_marks_of_another_form_are_counted():
    json_form, xml_form = FORMS[0], FORMS[1]
    stray = "<function=look>\n<parameter=text>\nx\n</parameter>\n</function>"
    assert json_form.read(stray) == [] and count_unread(stray, []) == 1
    foreign = xml_form.write([("look", {"text": "x"})])
    read = json_form.read(foreign)
    assert read[0].error and count_unread(foreign, read) == 1
    inside = json_form.write([("look", {"text": "<function=look>"})])
    assert count_unread(inside, json_form.read(inside)) == 0
    assert count_unread("No tool is needed: 3 < 4.", []) == 0


def test_types_come_from_the_tool_s_schema():
    xml = FORMS[1]

    def value(text, **schema):
        tools = [
            {
                "type": "function",
                "function": {"name": "f", "parameters": {"properties": {"x": schema}}},
            }
        ]
        call = f"<tool_call>\n<function=f>\n<parameter=x>\n{text}\n</parameter>\n</function>\n</tool_call>"
        return xml.read(call, tools)[0].value["arguments"]["x"]

    assert value("12", type="string") == "12" and value("12", type="integer") == 12
    assert value("3.0", type="integer") == 3 and isinstance(value("3.0", type="integer"), int)
    assert value("True", type="boolean") is True and value("false", type="boolean") is False
    assert value("1", type="boolean") == "1" and value("true", type="string") == "true"
    assert value("None", type=["string", "null"]) is None and value("None", type="string") == "None"
    assert value("null", type="string", nullable=True) is None
    assert value('{"a": 1}', type="object") == {"a": 1} and value("[1", type="array") == "[1"
    assert value("two", enum=["one", "two", 3]) == "two" and value("3", enum=["one", 3]) == 3
    assert value("7", anyOf=[{"type": "integer"}, {"type": "null"}]) == 7
    assert value("7") == "7" and value("[7]") == [7]
    assert value("1e999", type="number") == "1e999" and value("NaN", type="number") == "NaN"
    assert value(" a\n\nb ", type="string") == " a\n\nb "
    # A text about the form itself is a text.
    assert value("say </parameter> twice", type="string") == "say </parameter> twice"


def test_thoughts_are_told_apart_in_the_checkpoints_marks(renderers):
    for family in ("qwen3_5", "magistral", "gemma4"):
        renderer = renderers[family]
        begin, end = renderer.words.thought_marks
        answer = renderer.encode(f"{begin}\nHm.\n{end}\n\nI look.")
        thoughts = renderer.thoughts(answer)
        assert thoughts.reply == "I look." and thoughts.open is None
        assert renderer.thought_text(answer) == "Hm."
        assert renderer.thoughts(renderer.encode(f"{begin}\nHm.")).open == 0
        assert renderer.processor.decode(renderer.closing).strip() == end


def test_special_tokens_that_mark_calls_stay_in_the_text(renderers):
    renderer = renderers["magistral"]
    ids = renderer.encode('[TOOL_CALLS]look[ARGS]{"count": 3}<|im_end|>')
    assert renderer.processor.decode(ids) == '[TOOL_CALLS]look[ARGS]{"count": 3}'
    assert (
        np.isin(renderer.encode("[TOOL_CALLS]"), ids).all() and len(renderer.encode("[ARGS]")) == 1
    )
