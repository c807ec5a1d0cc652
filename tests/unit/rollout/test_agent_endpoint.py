"""The endpoint as a client sees it: OpenAI's forms, what is refused, and who may ask. The engine's answers are written down."""

import asyncio
import base64
import io
import json
import socket
import struct
import time
import zlib
from contextlib import asynccontextmanager

import httpx
import numpy as np
import openai
import pytest
from chat_templates import TEMPLATES
from episodes import encoded, picture
from PIL import Image
from scripted_engine import Scripted

from rlinf_vl.config.schema.data import VideoConfig
from rlinf_vl.data.images import to_image_ref
from rlinf_vl.extras.agents import chat
from rlinf_vl.extras.agents import endpoint as room
from rlinf_vl.extras.agents.contract import data_uri
from rlinf_vl.extras.agents.endpoint import Endpoint
from rlinf_vl.extras.agents.first_calls import FirstCalls
from rlinf_vl.extras.agents.session import AgentLimits, AgentSession
from rlinf_vl.models.families import family_of
from rlinf_vl.models.processing import Processor
from rlinf_vl.rollout.episode.generation_client import GenerationClient
from rlinf_vl.rollout.episode.renderer import Renderer
from rlinf_vl.rollout.episode.rollout_state import RolloutState
from rlinf_vl.types import READ_CALLS, UNREAD_CALLS, Problem, SamplingParams, distinct_tokens

SHOWN = encoded(picture(48, 32, 9))
PROBLEM = Problem("p:0", (), "18", (SHOWN,))
TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "add",
            "description": "Add.",
            "parameters": {"type": "object", "properties": {"a": {"type": "number"}}},
        },
    }
]
CALL = '<tool_call>\n{"name": "add", "arguments": {"a": 3}}\n</tool_call>'


@pytest.fixture(scope="module")
def processor(toy_folder):
    return Processor(toy_folder, family_of("qwen3_vl"))


@pytest.fixture(scope="module")
def tool_processor(toy_folder):
    """The chat template of the toy shows names of tools; this one shows their schemas."""
    processor = Processor(toy_folder, family_of("qwen3_vl"))
    shows = "{% if tools %}<|im_start|>system\n{% for t in tools %}{{ t | tojson }}{% endfor %}"
    processor.tokenizer.chat_template = (
        shows + "<|im_end|>\n{% endif %}" + processor.tokenizer.chat_template
    )
    return processor


@pytest.fixture(scope="module")
def thinking_processor(toy_folder, tool_processor):
    """As above, with a template that opens a thought in each reply."""
    processor = Processor(toy_folder, family_of("qwen3_vl"))
    processor.tokenizer.chat_template = tool_processor.tokenizer.chat_template + "<think>\n"
    return processor


class Served:
    """An endpoint with one session, whose engine answers what is written down."""

    host = "127.0.0.1"

    def __init__(self, processor, *answers, max_calls=50, allow_sampling=False):
        self.engine = Scripted(processor, answers or ["18"])
        self.client = GenerationClient(self.engine, Renderer(processor), 30.0)
        self.limits = AgentLimits(max_calls, 2000, allow_sampling)
        self.sampling = SamplingParams(max_new_tokens=50, stop_ids=processor.stop_ids)

    def session(self):
        state = RolloutState(PROBLEM, 7, session="s")
        first_calls = FirstCalls(self.client)
        return AgentSession(state, self.sampling, self.client, self.limits, first_calls)

    @asynccontextmanager
    async def __call__(self):
        self.endpoint = Endpoint(self.host)
        await self.endpoint.start()
        self.opened = self.session()
        self.key = self.endpoint.open(self.opened)
        client = openai.AsyncOpenAI(
            base_url=self.endpoint.url, api_key=self.key, max_retries=0, timeout=20
        )
        try:
            async with client:
                yield client
        finally:
            await self.opened.close()
            self.endpoint.close()
            await self.endpoint.wait_closed()


def user(text, *images):
    if not images:
        return {"role": "user", "content": text}
    parts = [{"type": "image_url", "image_url": {"url": data_uri(image)}} for image in images]
    return {"role": "user", "content": [{"type": "text", "text": text}, *parts]}


def run(served, talk):
    async def main():
        async with served() as client:
            return await talk(client)

    return asyncio.run(main())


def ask(client, messages, **options):
    return client.chat.completions.create(model="m", messages=messages, **options)


def test_a_reply_has_openais_form(processor):
    async def talk(client):
        completion = await ask(client, [user("What")], logprobs=True)
        models = await client.models.list()
        return completion, models

    completion, models = run(Served(processor, "18"), talk)
    (choice,) = completion.choices
    assert choice.message.content == "18" and choice.finish_reason == "stop"
    assert completion.model == "m" and completion.object == "chat.completion"
    n = len(choice.logprobs.content)
    assert completion.usage.completion_tokens == n >= 2 and completion.usage.prompt_tokens > 3
    assert [t.logprob for t in choice.logprobs.content] == [-1.0 - k - 7 for k in range(n)]
    assert [model.id for model in models.data] == ["policy"]


def test_a_stream_has_the_same_reply_in_pieces(processor):
    async def talk(client):
        options = {"stream": True, "stream_options": {"include_usage": True}}
        return [chunk async for chunk in await ask(client, [user("What")], **options)]

    chunks = run(Served(processor, "x = 3\nWhat"), talk)
    texts = [c.choices[0].delta.content or "" for c in chunks if c.choices]
    assert "".join(texts) == "x = 3\nWhat" and len([t for t in texts if t]) == 2
    assert chunks[-2].choices[0].finish_reason == "stop" and chunks[-1].usage.total_tokens > 0


def test_a_stream_has_no_line_ends_but_its_own(processor):
    async def talk(client):
        body = {"model": "m", "messages": [user("What")], "stream": True}
        headers = {"authorization": f"Bearer {served.key}"}
        url = f"{served.endpoint.url}/chat/completions"
        async with (
            httpx.AsyncClient(timeout=20) as http,
            http.stream("POST", url, json=body, headers=headers) as response,
        ):
            return [line async for line in response.aiter_lines() if line]

    served = Served(processor, "x\u2028y\x85z")
    *lines, _ = [line.removeprefix("data: ") for line in run(served, talk)]
    deltas = [json.loads(line)["choices"][0]["delta"] for line in lines]
    assert "".join(delta.get("content", "") for delta in deltas) == "x\u2028y\x85z"


def test_logprobs_have_the_bytes_of_parts_of_characters(processor):
    served = Served(processor, "x 日é")
    completion = run(served, lambda client: ask(client, [user("What")], logprobs=True))
    entries = completion.choices[0].logprobs.content
    assert any("\ufffd" in entry.token for entry in entries)
    data = bytes(value for entry in entries[:-1] for value in entry.bytes)
    assert data.decode() == "x 日é"


def test_calls_of_tools_go_there_and_back_without_a_token_encoded_again(tool_processor):
    async def talk(client):
        messages = [user("What")]
        first = await ask(client, messages, tools=TOOLS)
        message = first.choices[0].message
        tool = {"role": "tool", "tool_call_id": message.tool_calls[0].id, "content": "6"}
        messages += [message.model_dump(exclude_none=True), tool]
        return first, await ask(client, messages, tools=TOOLS)

    served = Served(tool_processor, f"What\n{CALL}", "18")
    first, second = run(served, talk)
    (call,) = first.choices[0].message.tool_calls
    assert call.function.name == "add" and json.loads(call.function.arguments) == {"a": 3}
    assert first.choices[0].finish_reason == "tool_calls"
    assert first.choices[0].message.content == "What" and second.choices[0].message.content == "18"
    state = served.opened.state
    assert len(state.sequences) == 1 and len(state.turns) == 2
    asked, asked_again = (request.ids for request in served.engine.requests)
    # The second prompt begins with the first one and its very answer.
    answer = state.sequences[0].ids[state.turns[0].start : state.turns[0].end]
    begin = np.concatenate([asked, answer])
    assert np.array_equal(asked_again[: len(begin)], begin)
    assert '"name": "add"' in tool_processor.tokenizer.decode(asked)


def test_a_tool_may_be_required(tool_processor):
    async def talk(client):
        required = await ask(client, [user("What")], tools=TOOLS, tool_choice="required")
        named = {"type": "function", "function": {"name": "add"}}
        return required, await ask(client, [user("x")], tools=TOOLS, tool_choice=named)

    rest = '{"name": "add", "arguments": {"a": 3}}\n</tool_call>'
    served = Served(tool_processor, rest, rest.partition('"arguments": ')[2])
    for completion in run(served, talk):
        (call,) = completion.choices[0].message.tool_calls
        assert call.function.name == "add" and json.loads(call.function.arguments) == {"a": 3}
    # What the reply was made to begin with carries no loss.
    for sequence, turn in zip(
        served.opened.state.sequences, served.opened.state.turns, strict=True
    ):
        begin = tool_processor.tokenizer.decode(sequence.ids[: turn.start])
        assert "<tool_call>" in begin[-70:] and not sequence.loss_mask[: turn.start].any()


def test_a_required_tool_is_called_behind_an_open_thought(thinking_processor):
    rest = '{"name": "add", "arguments": {"a": 3}}\n</tool_call>'
    served = Served(thinking_processor, rest, "so</think>18")

    async def talk(client):
        options = {"tools": TOOLS, "tool_choice": "required"}
        return await ask(client, [user("What")], **options), await ask(client, [user("x")])

    first, second = run(served, talk)
    (call,) = first.choices[0].message.tool_calls
    assert json.loads(call.function.arguments) == {"a": 3}
    assert second.choices[0].message.content == "18"
    thoughts = [turn.thought for turn in served.opened.state.turns]
    assert thoughts[0] == 0 < thoughts[1]


def test_tools_that_the_template_does_not_show_are_refused(toy_folder):
    processor = Processor(toy_folder, family_of("qwen3_vl"))
    template = processor.tokenizer.chat_template
    processor.tokenizer.chat_template = template[template.index("{%- for message") :]

    async def talk(client):
        with pytest.raises(openai.BadRequestError, match="does not show tools; describe them"):
            await ask(client, [user("What")], tools=TOOLS)

    run(Served(processor), talk)


def test_words_of_a_template_that_refuses_messages_reach_the_agent(toy_folder):
    processor = Processor(toy_folder, family_of("qwen3_vl"))
    refusals = """{%- for message in messages %}
      {%- if message.content == "twice" %}{{ raise_exception("roles must alternate") }}{% endif %}
      {%- if message.content == "name" %}{{ "by " + message.name }}{% endif %}
      {%- if message.content == "sum" %}{{ "by " + 1 }}{% endif %}
    {%- endfor %}"""
    processor.tokenizer.chat_template = refusals + processor.tokenizer.chat_template
    reasons = {
        "twice": "roles must alternate",
        "name": "has no attribute 'name'",
        "sum": "TypeError: can only concatenate str",
    }

    async def talk(client):
        for text, reason in reasons.items():
            with pytest.raises(openai.BadRequestError, match=f"chat template.*{reason}"):
                await ask(client, [user(text)])

    run(Served(processor), talk)


def test_broken_calls_and_choice_none_leave_text(tool_processor):
    async def talk(client):
        broken = await ask(client, [user("What")], tools=TOOLS)
        return broken, await ask(client, [user("x")], tools=TOOLS, tool_choice="none")

    served = Served(tool_processor, '<tool_call>{"name": </tool_call>', CALL)
    for completion in run(served, talk):
        message = completion.choices[0].message
        assert message.tool_calls is None and "<tool_call>" in message.content
    # Where calls are text they are neither read nor missed.
    metrics = served.opened.metrics
    assert (metrics[READ_CALLS], metrics[UNREAD_CALLS]) == (0, 1)


def processor_of_form(toy_folder, family):
    processor = Processor(toy_folder, family_of("qwen3_vl"))
    processor.tokenizer.chat_template = TEMPLATES[family][0]
    return processor


XML = "<tool_call>\n<function=add>\n<parameter=a>\n3\n</parameter>\n</function>\n</tool_call>"


def test_an_agent_sees_the_calls_of_a_checkpoint_with_a_form_of_its_own(toy_folder):
    processor = processor_of_form(toy_folder, "qwen3_5")

    async def talk(client):
        messages = [user("What")]
        first = await ask(client, messages, tools=TOOLS)
        message = first.choices[0].message
        tool = {"role": "tool", "tool_call_id": message.tool_calls[0].id, "content": "6"}
        messages += [message.model_dump(exclude_none=True), tool]
        pieces = await ask(client, messages, tools=TOOLS, stream=True)
        return first, [piece async for piece in pieces]

    served = Served(processor, f"<think>\nso\n</think>\n\nI add.\n\n{XML}", f"{XML}\n{XML}")
    first, pieces = run(served, talk)
    (choice,) = first.choices
    (call,) = choice.message.tool_calls
    assert call.function.name == "add" and json.loads(call.function.arguments) == {"a": 3}
    assert choice.finish_reason == "tool_calls" and choice.message.content == "I add."
    assert choice.message.model_extra["reasoning_content"] == "so"
    deltas = [piece.choices[0] for piece in pieces if piece.choices]
    (calls,) = [choice.delta.tool_calls for choice in deltas if choice.delta.tool_calls]
    assert [json.loads(call.function.arguments) for call in calls] == [{"a": 3}] * 2
    assert deltas[-1].finish_reason == "tool_calls"
    state = served.opened.state
    # The second call extends the ids of the first: nothing was encoded again.
    assert len(state.sequences) == 1 and len(state.turns) == 2
    assert served.opened.metrics[READ_CALLS] == 3 and served.opened.metrics[UNREAD_CALLS] == 0


def test_calls_in_another_form_are_counted_and_stay_text(toy_folder):
    served = Served(processor_of_form(toy_folder, "qwen3_5"), CALL)

    async def talk(client):
        return await ask(client, [user("What")], tools=TOOLS)

    (choice,) = run(served, talk).choices
    assert choice.message.tool_calls is None and choice.finish_reason == "stop"
    assert served.opened.metrics[UNREAD_CALLS] == 1 and served.opened.metrics[READ_CALLS] == 0


@pytest.mark.parametrize(
    ("family", "choice", "answer"),
    [
        ("qwen3_5", "required", XML.partition("<function=")[2]),
        ("qwen3_5", "add", XML.partition("<function=add>\n")[2]),
        ("glm4_7", "add", "<arg_key>a</arg_key><arg_value>3</arg_value></tool_call>"),
        ("llama4", "required", '"add", "parameters": {"a": 3}}'),
    ],
)
def test_a_required_call_begins_in_the_template_s_form(toy_folder, family, choice, answer):
    served = Served(processor_of_form(toy_folder, family), answer)
    named = {"type": "function", "function": {"name": choice}}

    async def talk(client):
        chosen = choice if choice == "required" else named
        return await ask(client, [user("What")], tools=TOOLS, tool_choice=chosen)

    (call,) = run(served, talk).choices[0].message.tool_calls
    assert call.function.name == "add" and json.loads(call.function.arguments) == {"a": 3}


def test_tools_are_refused_where_their_calls_could_not_be_read(toy_folder):
    async def talk(client):
        with pytest.raises(openai.BadRequestError, match="tools: .*not known: '<|calls_begin|>"):
            await ask(client, [user("What")], tools=TOOLS)
        return await ask(client, [user("What")])

    served = Served(processor_of_form(toy_folder, "deepseek"), "18")
    assert run(served, talk).choices[0].message.content == "18"


def test_an_answer_ends_at_a_stop_text_and_only_its_tokens_are_kept(processor):
    async def talk(client):
        first = await ask(client, [user("What")], stop=[" = ", "never"])
        message = first.choices[0].message.model_dump(exclude_none=True)
        return first, await ask(client, [user("What"), message, user("x")])

    served = Served(processor, "x = 3 and more", "18")
    first, _ = run(served, talk)
    assert first.choices[0].message.content == "x" and first.choices[0].finish_reason == "stop"
    state = served.opened.state
    turn = state.turns[0]
    text = processor.tokenizer.decode(state.sequences[0].ids[turn.start : turn.end])
    assert " = " in text and "and" not in text
    assert len(state.sequences) == 1  # the second call continues exactly that


def test_a_stop_text_within_thoughts_ends_them(thinking_processor):
    served = Served(thinking_processor, "x = 3</think>18")
    run(served, lambda client: ask(client, [user("What")], stop=" = "))
    (turn,) = served.opened.state.turns
    assert turn.thought == turn.end - turn.start < 6


def test_a_stop_text_is_found_without_reading_each_beginning(processor, monkeypatch):
    lengths = []
    decode = processor.decode

    def counted(ids):
        lengths.append(len(ids))
        return decode(ids)

    monkeypatch.setattr(processor, "decode", counted)
    served = Served(processor, "x 3\n" * 300 + "What = 18")
    completion = run(served, lambda client: ask(client, [user("x")], stop=" = "))
    assert completion.choices[0].message.content.endswith("What")
    assert max(lengths) > 900 and sum(lengths) < 30 * max(lengths)


def test_calls_that_are_refused_keep_no_images(processor):
    async def talk(client):
        for number in range(2):
            with pytest.raises(openai.BadRequestError, match="temperature"):
                await ask(client, [user("x", encoded(picture(48, 32, number)))], temperature=0.3)
        await ask(client, [user("x", encoded(picture(48, 32, 5)))])

    served = Served(processor)
    run(served, talk)
    session = served.opened
    assert len(session.images) == 1 + 1  # the problem's, and that of the call that was answered
    assert [len(call.observation.images) for call in session._calls] == [0, 0, 1]


def test_a_branch_shares_what_it_shares(processor):
    async def talk(client):
        start = [user("What", SHOWN)]
        first = await ask(client, start)
        reply = first.choices[0].message.model_dump(exclude_none=True)
        await ask(client, [*start, reply, user("a")])
        await ask(client, [*start, reply, user("b")])  # another continuation
        await ask(client, start)  # a retry
        await ask(client, [user("other"), reply, user("a")])  # a history of its own

    served = Served(processor, "18")
    run(served, talk)
    state = served.opened.state
    assert [turn.sequence for turn in state.turns] == [0, 0, 1, 2, 3]
    # Of the second branch only its own answer is trained on.
    masks = [int(sequence.loss_mask.sum()) for sequence in state.sequences]
    answer = state.turns[0].end - state.turns[0].start
    assert masks == [2 * answer, answer, answer, answer]
    metrics = served.opened.metrics
    assert metrics["agent/calls"] == 5 and metrics["agent/branches"] == 3
    assert metrics["agent/resumed_share"] == 2 / 4
    assert metrics["agent/foreign_assistant_tokens"] == answer - 1  # without the end token
    # Each answer has a random stream of its own; the first two are those of an environment.
    seeds = [request.seeds[0] for request in served.engine.requests]
    assert seeds[0] == 7 and len(set(seeds)) == 5
    sessions = [request.sessions[0] for request in served.engine.requests]
    assert sessions[:2] == ["s", "s"] and len(set(sessions[1:])) == 4
    assert set(served.engine.ended) == set(sessions)
    image_token_id = processor.image_token_id
    assert state.distinct_tokens == distinct_tokens(state.sequences, image_token_id)


def test_an_image_is_decoded_once_however_often_it_is_sent(processor, monkeypatch):
    decoded = []

    def counted(url, **options):
        decoded.append(url)
        return to_image_ref(url, **options)

    monkeypatch.setattr(chat, "to_image_ref", counted)

    async def talk(client):
        messages = [user("What", encoded(picture(48, 32, 1)))]
        for _ in range(4):
            completion = await ask(client, messages)
            reply = completion.choices[0].message.model_dump(exclude_none=True)
            messages += [reply, user("Sure?")]

    served = Served(processor, "18")
    run(served, talk)
    (sequence,) = served.opened.state.sequences
    assert len(decoded) == len(sequence.images) == 1


def test_an_answer_counts_while_its_text_is_made(processor, monkeypatch):
    """A call at the same time would take its room, and the trajectory exceed its length."""
    make_reply = AgentSession._reply

    def slow_reply(session, call, request):
        time.sleep(0.3)
        return make_reply(session, call, request)

    monkeypatch.setattr(AgentSession, "_reply", slow_reply)

    async def talk(client):
        return await asyncio.gather(*(ask(client, [user(text)]) for text in ("What", "x = 3")))

    served = Served(processor, "18")
    served.limits = AgentLimits(max_calls=50, seq_length=70)
    _, last_completion = run(served, talk)
    last_request = served.engine.requests[-1]
    before = served.opened.state.distinct_tokens - last_completion.usage.completion_tokens
    assert before + last_request.sampling.max_new_tokens == 70


def test_an_image_that_was_encoded_again_is_another_image_and_counted(processor):
    buffer = io.BytesIO()
    Image.open(io.BytesIO(SHOWN.data)).save(buffer, "PNG", compress_level=0)
    again = f"data:image/png;base64,{base64.b64encode(buffer.getvalue()).decode()}"

    async def talk(client):
        part = {"type": "image_url", "image_url": {"url": again}}
        await ask(client, [user("What", SHOWN)])
        await ask(client, [{"role": "user", "content": [part]}])

    served = Served(processor, "18")
    run(served, talk)
    assert served.opened.metrics["agent/reencoded_images"] == 1
    hashes = [image.hash for s in served.opened.state.sequences for image, _ in s.images]
    assert len(set(hashes)) == 2


REFUSED = [
    ({"n": 2}, "n: 2 is not supported"),
    ({"temperature": 0.3}, "temperature: 0.3 is not the run's 1.0"),
    ({"top_p": 0.3}, "top_p: 0.3 is not the run's"),
    ({"max_tokens": 0}, "max_tokens: 0 must be at least 1"),
    ({"seed": 3}, "seed: this parameter is not supported"),
    ({"response_format": {"type": "json_object"}}, "response_format: "),
    ({"tool_choice": "required"}, "tool_choice: 'required' is none of"),
    ({"tools": [{"type": "function"}]}, r"tools\[0\]: "),
    ({"messages": []}, "messages: a list with at least one"),
    ({"messages": [{"role": "robot", "content": "x"}]}, r"messages\[0\]: .* has no role of"),
    ({"messages": [{"role": "assistant", "content": "x"}]}, "the last one is the assistant's"),
    ({"messages": [user("x"), {"role": "user"}]}, r"messages\[1\]: the content None is neither"),
    (
        {"messages": [{"role": "user", "content": [{"type": "input_audio"}]}]},
        "a part of type 'input_audio'",
    ),
    (
        {
            "messages": [
                {
                    "role": "user",
                    "content": [
                        {"type": "image_url", "image_url": {"url": "http://169.254.169.254/x"}}
                    ],
                }
            ]
        },
        "is no data URI; nothing is fetched",
    ),
    (
        {
            "messages": [
                {
                    "role": "user",
                    "content": [{"type": "image_url", "image_url": {"url": "file:///etc/passwd"}}],
                }
            ]
        },
        "is no data URI",
    ),
]


@pytest.mark.parametrize(("options", "reason"), REFUSED)
def test_what_can_not_be_done_exactly_is_refused_with_openais_error(processor, options, reason):
    async def talk(client):
        with pytest.raises(openai.BadRequestError, match=reason):
            await ask(client, **({"messages": [user("What")]} | options))
        return await ask(client, [user("What")])

    served = Served(processor, "18")
    assert run(served, talk).choices[0].message.content == "18"
    assert len(served.opened.state.turns) == 1


def body_of(*messages, **options):
    return json.dumps({"messages": [*messages, user("x")]} | options)


ASSISTANT = {"role": "assistant", "content": None}


@pytest.mark.parametrize(
    ("body", "reason"),
    [
        (body_of(temperature=float("nan")), "NaN is no JSON"),
        (body_of(top_p=0.5).replace("0.5", "1e999"), "1e999 is too large a number"),
        (body_of(temperature=1e-30), "temperature: 1e-30 must be 0, or at least 0.001"),
        (body_of(ASSISTANT | {"function_call": {"name": "add"}}), "'function_call': this field"),
        (body_of(ASSISTANT | {"refusal": "No."}), "'refusal': this field"),
        (body_of(ASSISTANT | {"audio": {"id": "a"}}), "'audio': this field"),
        (body_of(ASSISTANT | {"tool_calls": 3}), "tool_calls: 3 is no list"),
        (body_of(ASSISTANT | {"reasoning_content": ["so"]}), "reasoning_content: .* is no text"),
    ],
)
def test_requests_are_refused_and_no_field_is_dropped(body, reason):
    with pytest.raises(chat.ChatError, match=reason):
        room._parsed(body.encode(), {}, VideoConfig())


def test_arguments_mean_the_same_as_an_object_and_as_a_text():
    requests = []
    for arguments in ({"a": 3, "é": None}, '{"a": 3, "é": null}'):
        call = {"id": "c", "function": {"name": "add", "arguments": arguments}}
        # What is empty is not there.
        message = ASSISTANT | {"tool_calls": [call], "refusal": None, "audio": {}}
        requests.append(room._parsed(body_of(message).encode(), {}, VideoConfig()))
    first, second = requests
    assert first.keys == second.keys and first.messages == second.messages
    function = first.messages[0]["tool_calls"][0]["function"]
    assert function["arguments"] == {"a": 3, "é": None}


def test_arguments_that_can_not_be_read_are_a_text():
    deep = "[" * 100_000
    call = {"id": None, "function": {"name": "add", "arguments": deep}}
    parsed = room._parsed(body_of(ASSISTANT | {"tool_calls": [call]}).encode(), {}, VideoConfig())
    assert parsed.messages[0]["tool_calls"][0]["function"]["arguments"] == deep


def test_a_run_may_let_agents_choose_their_sampling(processor):
    served = Served(processor, "18", allow_sampling=True)
    run(served, lambda client: ask(client, [user("What")], temperature=0.3, max_tokens=9))
    (request,) = served.engine.requests
    assert request.sampling.temperature == 0.3 and request.sampling.max_new_tokens == 9


def huge_png():
    """A header that declares 40,000 × 40,000 pixels: 4.8 GB as RGB."""
    body = struct.pack(">IIBBBBB", 40_000, 40_000, 8, 2, 0, 0, 0)
    chunk = b"IHDR" + body
    header = struct.pack(">I", len(body)) + chunk + struct.pack(">I", zlib.crc32(chunk))
    data = b"\x89PNG\r\n\x1a\n" + header
    return f"data:image/png;base64,{base64.b64encode(data).decode()}"


def test_strangers_and_excess_are_refused(processor, monkeypatch):
    monkeypatch.setattr(room, "MAX_BODY", 2**20)

    async def talk(client):
        url = served.endpoint.url
        body = {"model": "m", "messages": [user("What")]}
        statuses = {}
        async with httpx.AsyncClient(timeout=20) as http:

            async def status(name, path="/chat/completions", key=served.key, **options):
                headers = {"authorization": f"Bearer {key}"} | options.pop("headers", {})
                options = {"json": body} | options
                response = await http.post(url + path, headers=headers, **options)
                statuses[name] = response.status_code
                return response

            await status("ours")
            await status("a wrong key", key="rlinf-0")
            await status("no key", headers={"authorization": ""})
            other = served.session()
            other_key = served.endpoint.open(other)
            await status("another trajectory's", key=other_key)
            served.endpoint.end(other_key)
            await status("a key after its end", key=other_key)
            await status("a path outside", path="/../../etc/passwd")
            await status("another host", headers={"host": "evil.example"})
            await status("no JSON", content=b"{", json=None)
            await status("too much", content=b" " * (2**20 + 1), json=None)
            await status("deep JSON", content=b"[" * 100_000, json=None)
            part = {"type": "image_url", "image_url": {"url": huge_png()}}
            huge = {"model": "m", "messages": [{"role": "user", "content": [part]}]}
            statuses["a huge image"] = (
                await http.post(
                    f"{url}/chat/completions",
                    json=huge,
                    headers={"authorization": f"Bearer {served.key}"},
                )
            ).status_code
            try:
                await status("headers of 1 MB", headers={"x": "y" * 2**20})
            except httpx.HTTPError:
                statuses["headers of 1 MB"] = "closed"
            statuses["health"] = (await http.get(url.removesuffix("/v1") + "/health")).status_code
            statuses["models"] = (await http.get(url + "/models")).status_code
            await status("ours again")
            assert len(other.state.turns) == 1
        return statuses

    served = Served(processor, "18")
    statuses = run(served, talk)
    assert statuses == {
        "ours": 200,
        "a wrong key": 401,
        "no key": 401,
        "another trajectory's": 200,
        "a key after its end": 401,
        "a path outside": 404,
        "another host": 400,
        "no JSON": 400,
        "too much": 413,
        "deep JSON": 400,
        "a huge image": 400,
        "headers of 1 MB": statuses["headers of 1 MB"],
        "health": 200,
        "models": 401,
        "ours again": 200,
    }
    assert statuses["headers of 1 MB"] in (400, 431, "closed")
    assert len(served.opened.state.turns) == 2


def test_it_listens_on_this_machine_only(processor):
    async def talk(client):
        port = int(served.endpoint.url.rpartition(":")[2].partition("/")[0])
        own = {info[4][0] for info in socket.getaddrinfo(socket.gethostname(), None)}
        for address in own - {"127.0.0.1", "::1"}:
            with socket.socket() as probe:
                probe.settimeout(1)
                assert probe.connect_ex((address, port)) != 0 or address.startswith("127.")
        return await ask(client, [user("What")])

    served = Served(processor, "18")
    run(served, talk)
    assert served.endpoint.url.startswith("http://127.0.0.1:")


@pytest.mark.parametrize("host", ["::1", "::"])
def test_it_listens_at_addresses_of_ipv6(processor, host):
    try:
        socket.create_server(("::1", 0), family=socket.AF_INET6).close()
    except OSError:
        pytest.skip("this machine has no IPv6")

    async def talk(client):
        return await ask(client, [user("What")])

    served = Served(processor, "18")
    served.host = host
    assert run(served, talk).choices[0].message.content == "18"
    assert served.endpoint.url.startswith(f"http://[{host}]:")


def test_a_server_that_can_not_listen_says_so_at_its_start():
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
        with pytest.raises(OSError, match=f"can't listen on 127.0.0.1:{port}: Address already"):
            Endpoint(port=port).bind()
    with pytest.raises(OSError, match="can't listen on 192.0.2.7:0: Cannot assign"):
        Endpoint("192.0.2.7").bind()


@pytest.mark.slow
def test_an_idle_connection_stays_open(processor):
    """Clients close theirs after 5 idle seconds; one that the server closes then loses a call."""

    async def talk(client):
        address = httpx.URL(served.endpoint.url)
        reader, writer = await asyncio.open_connection(address.host, address.port)
        request = f"GET /health HTTP/1.1\r\nHost: {address.host}\r\n\r\n".encode()
        for idle_s in (0, 6):
            await asyncio.sleep(idle_s)
            writer.write(request)
            assert (await reader.readline()).startswith(b"HTTP/1.1 200")
            await reader.readuntil(b"}")
        writer.close()

    served = Served(processor)
    run(served, talk)


def test_an_engine_that_dies_ends_the_trajectory(processor):
    async def talk(client):
        with pytest.raises(openai.InternalServerError, match="engine"):
            await ask(client, [user("What")])

    served = Served(processor, RuntimeError("out of memory"))
    run(served, talk)
    assert "out of memory" in str(served.opened.failure.exception())
