"""Agents for tests: they drive themselves through an OpenAI client, some of them badly."""

import asyncio
import os
import random
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace
from typing import NamedTuple

from episodes import Talk, encoded, picture
from openai import BadRequestError

from rlinf_vl.extras.agents import AgentResult
from rlinf_vl.extras.agents.contract import data_uri
from rlinf_vl.extras.toy.maze import Maze, distances
from rlinf_vl.rollout.episode.observation import observe


def openai_messages(messages, problem):
    """Messages of an environment in OpenAI's form: images as data URIs."""
    observation = observe(messages, problem)
    uris = {image.url: data_uri(image) for image in observation.images}
    converted = []
    for message in observation.messages:
        content = message["content"]
        if not isinstance(content, str):
            content = [
                part | {"image_url": {"url": uris[part["image_url"]["url"]]}}
                if part["type"] == "image_url"
                else part
                for part in content
            ]
        converted.append(message | {"content": content})
    return converted


async def play_env(env, task, client) -> AgentResult:
    """Play an environment as a player would, through the client."""
    messages = openai_messages(env.start(task.problem), task.problem)
    rewards, done = {}, False
    try:
        while not done:
            completion = await client.chat.completions.create(model="policy", messages=messages)
            message = completion.choices[0].message
            result = env.step(message.content)
            rewards[completion.id], done = result.reward, result.done
            messages += [
                message.model_dump(exclude_none=True),
                *openai_messages(result.messages, task.problem),
            ]
    finally:
        env.close()
    return AgentResult(0.0, call_rewards=rewards)


async def talk(task, client):
    return await play_env(Talk(task.seed), task, client)


class PaidMaze(Maze):
    """The maze, whose moves are paid 1/16 for each cell nearer to the goal, and -1/16 for each farther."""

    def __init__(self, seed: int) -> None:
        super().__init__(reward_max=1.0, reward_min=0.0, seed=seed)

    @property
    def distance(self) -> int:
        """The number of moves to the goal."""
        return distances(self.position.walls, self.position.goal)[self.position.agent]

    def step(self, response):
        distance = self.distance
        result = super().step(response)
        return replace(result, reward=(distance - self.distance) / 16)


async def paid_walk(task, client):
    """Walk the maze: each call has its reward, and being at the goal half a point; metrics repeat both."""
    maze = PaidMaze(task.seed)
    result = await play_env(maze, task, client)
    reward = 0.5 if maze.distance == 0 else 0.0
    metrics = {f"paid_{k}": paid for k, paid in enumerate(result.call_rewards.values())}
    return replace(result, reward=reward, metrics=metrics | {"paid_at_goal": reward})


async def shows_a_tool(task, client):
    """Ask with a tool that adds."""
    number = {"type": "integer"}
    schema = {"type": "object", "properties": {"a": number, "b": number}, "required": ["a", "b"]}
    tool = {"type": "function", "function": {"name": "add", "parameters": schema}}
    await client.chat.completions.create(model="policy", messages=task.messages, tools=[tool])
    return 0.0


async def asks_and_fails(task, client):
    """Ask for what is refused."""
    await client.chat.completions.create(model="policy", messages=task.messages, n=3)


async def asks_and_goes_on(task, client):
    """Ask for what is refused, and take no notice."""
    with suppress(Exception):
        await asks_and_fails(task, client)
    return 0.0


def ask(text, *images):
    parts = [{"type": "image_url", "image_url": {"url": data_uri(image)}} for image in images]
    return {"role": "user", "content": [{"type": "text", "text": text}, *parts]}


FURTHER_IMAGES = tuple(encoded(picture(32, 48, seed)) for seed in (1, 2))


class Step(NamedTuple):
    """A step of a wild agent.

    Attributes:
        action: what becomes of the conversation before it is sent; any other name leaves it alone.
        conversation: the conversation's number, counted round and round.
        calls: options of the calls that are made with it at once.
        question: a text and numbers of images, which follow each reply.
    """

    action: str
    conversation: int
    calls: Sequence["CallOptions"]
    question: tuple[str, Sequence[int]]


class CallOptions(NamedTuple):
    """Options of a call; a stream is closed after `pieces` of it, and None asks for no stream."""

    max_tokens: int | None = None
    pieces: int | None = None
    tools: bool = False


ACTIONS = ("go on", "edit", "compact", "foreign", "tool")


def random_steps(seed: int) -> list[Step]:
    """Draw the steps of a wild agent."""
    draw = random.Random(seed)

    def options() -> CallOptions:
        pieces = draw.choice((1, 3, 9)) if draw.random() < 0.3 else None
        return CallOptions(draw.choice((None, 2, 5)), pieces, draw.random() < 0.2)

    steps = []
    for _ in range(draw.randint(1, 5)):
        calls = [options() for _ in range(draw.choice((1, 1, 1, 1, 1, 1, 1, 3)))]
        images = draw.choices(range(3), k=draw.randint(0, 3))
        question = draw.choice(("What", "x = 3", "")), images
        action = draw.choice(("go on", *ACTIONS))
        steps.append(Step(action, draw.randrange(1000), calls, question))
    return steps


async def wild(task, client):
    """Take steps that the seed draws, or those of the column `steps` for it."""
    steps = task.columns["steps"][task.seed] if task.columns else random_steps(task.seed)
    return await take_steps(steps, task, client)


async def take_steps(steps, task, client):
    """Call in every order that an agent may: branches, edits, compaction, retries, parallel calls,
    tools and their results, streams cut in the middle, and 0 to 3 images a message. A refused call
    is the last one."""
    images = (*task.problem.images, *FURTHER_IMAGES)
    conversations = [[ask("What", *task.problem.images)]]

    async def call(messages, options):
        settings: dict = {"stream": options.pieces is not None}
        if options.max_tokens is not None:
            settings["max_tokens"] = options.max_tokens
        if options.tools:
            settings["tools"] = [{"type": "function", "function": {"name": "f", "parameters": {}}}]
        completion = await client.chat.completions.create(
            model="policy", messages=messages, **settings
        )
        if options.pieces is None:
            return completion.choices[0].message.model_dump(exclude_none=True)
        text, pieces = "", 0
        async for chunk in completion:
            if chunk.choices and chunk.choices[0].delta.content:
                text += chunk.choices[0].delta.content
            pieces += 1
            if pieces == options.pieces:
                await completion.close()  # cut in the middle
                break
        return {"role": "assistant", "content": text}

    for step in steps:
        messages = conversations[step.conversation % len(conversations)]
        if step.action == "edit":
            messages = [ask("x = 3", *task.problem.images), *messages[1:]]
        elif step.action == "compact":
            messages = [ask("What"), messages[-1]] if len(messages) > 1 else messages
        elif step.action == "foreign":
            messages = [ask("What"), {"role": "assistant", "content": "7"}, ask("x = 3")]
        elif step.action == "tool":
            messages = tool_result(messages)
        # All are awaited: what an agent leaves running is cancelled with its end.
        replies = await asyncio.gather(
            *(call(messages, options) for options in step.calls), return_exceptions=True
        )
        text, numbers = step.question
        question = ask(text, *(images[number] for number in numbers))
        for reply in replies:
            if isinstance(reply, BadRequestError):
                return 0.0
            if isinstance(reply, BaseException):
                raise reply
            conversations.append([*messages, reply, question])
    return 1.0


def tool_result(messages):
    """Return a conversation with a call that the agent says the policy has made, and its result."""
    call = {"id": "c", "type": "function", "function": {"name": "f", "arguments": "{}"}}
    reply = {"role": "assistant", "content": "", "tool_calls": [call]}
    return [*messages, reply, {"role": "tool", "tool_call_id": "c", "content": "6"}]


async def crash(task, client):
    raise RuntimeError("no luck")


async def never_calls(task, client):
    return 1.0


async def returns_a_list(task, client):
    await client.chat.completions.create(model="policy", messages=[ask("What")])
    return [1.0]


async def refused(task, client):
    """Agents 0 and 1 make a first call that is refused, by its form or by the run, and hang."""
    import openai

    options = [{"n": 2}, {"temperature": 0.123}, {}][min(task.seed, 2)]
    try:
        await client.chat.completions.create(model="policy", messages=[ask("What")], **options)
    except openai.BadRequestError:
        await asyncio.sleep(10**6)
    return 1.0


async def hangs(task, client):
    await asyncio.sleep(10**6)


def blocks(task, client):
    import time

    time.sleep(3)


async def loops(task, client):
    while True:
        await client.chat.completions.create(model="policy", messages=[ask("What")])


def in_a_thread(task, client):
    completion = client.chat.completions.create(model="policy", messages=[ask("What")])
    assert os.getpid()
    return AgentResult(answer=completion.choices[0].message.content)


async def asks_again(task, client):
    """The same question three times, the first time for a reply of one token."""
    for limit in ({"max_tokens": 1}, {}, {}):
        await client.chat.completions.create(model="policy", messages=[ask("What")], **limit)
    return 1.0


async def branching(task, client):
    """Three turns, another third one, a conversation of its own, and the first question again."""

    async def call(messages):
        completion = await client.chat.completions.create(model="policy", messages=messages)
        return [*messages, completion.choices[0].message.model_dump(exclude_none=True)]

    image = task.problem.images[0]
    first = await call([ask("What", image)])
    second = await call([*first, ask("And now")])
    await call([*second, ask("Sure", image)])
    await call([*second, ask("Look again")])
    await call([ask("Add 3 and 4")])
    await call([ask("What", image)])
    return 1.0
