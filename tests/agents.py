"""Agents for tests: they drive themselves through an OpenAI client, some of them badly."""

import asyncio
import os
import random
from dataclasses import replace

from episodes import Talk, encoded, picture

from rlinf_vl.agents import AgentResult
from rlinf_vl.agents.contract import data_uri
from rlinf_vl.rollout.observation import observe
from rlinf_vl.toy.maze import Maze, distances


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


def ask(text, *images):
    parts = [{"type": "image_url", "image_url": {"url": data_uri(image)}} for image in images]
    return {"role": "user", "content": [{"type": "text", "text": text}, *parts]}


FURTHER_IMAGES = tuple(encoded(picture(32, 48, seed)) for seed in (1, 2))


async def wild(task, client):
    """Calls in every order that an agent may: branches, edits, compaction, retries, parallel calls,
    tools and their results, streams cut in the middle, and 0 to 3 images a message."""
    draw = random.Random(task.seed)
    conversations = [[ask("What", *task.problem.images)]]

    def question():
        images = task.problem.images + FURTHER_IMAGES
        return ask(draw.choice(("What", "x = 3", "")), *draw.choices(images, k=draw.randint(0, 3)))

    def tool_result(messages):
        """A call that the agent says the policy has made, and what it returned."""
        call = {"id": "c", "type": "function", "function": {"name": "f", "arguments": "{}"}}
        reply = {"role": "assistant", "content": "", "tool_calls": [call]}
        return [*messages, reply, {"role": "tool", "tool_call_id": "c", "content": "6"}]

    async def call(messages):
        stream = draw.random() < 0.3
        options = {"max_tokens": draw.choice((None, 2, 5)), "stream": stream}
        if draw.random() < 0.2:
            options["tools"] = [{"type": "function", "function": {"name": "f", "parameters": {}}}]
        options = {name: value for name, value in options.items() if value is not None}
        completion = await client.chat.completions.create(
            model="policy", messages=messages, **options
        )
        if not stream:
            return completion.choices[0].message.model_dump(exclude_none=True)
        text, pieces = "", 0
        async for chunk in completion:
            if chunk.choices and chunk.choices[0].delta.content:
                text += chunk.choices[0].delta.content
            pieces += 1
            if draw.random() < 0.1:
                await completion.close()  # cut in the middle
                break
        return {"role": "assistant", "content": text}

    for _ in range(draw.randint(1, 5)):
        messages = draw.choice(conversations)
        action = draw.choice(
            ("go on", "go on", "retry", "edit", "compact", "parallel", "foreign", "tool")
        )
        if action == "parallel":
            replies = await asyncio.gather(*(call(messages) for _ in range(3)))
            conversations += [[*messages, reply, question()] for reply in replies]
            continue
        if action == "edit":
            messages = [ask("x = 3", *task.problem.images), *messages[1:]]
        elif action == "compact":
            messages = [ask("What"), messages[-1]] if len(messages) > 1 else messages
        elif action == "foreign":
            messages = [ask("What"), {"role": "assistant", "content": "7"}, ask("x = 3")]
        elif action == "tool":
            messages = tool_result(messages)
        reply = await call(messages)
        conversations.append([*messages, reply, question()])
    return draw.random()


async def crash(task, client):
    raise RuntimeError("no luck")


async def never_calls(task, client):
    return 1.0


async def returns_a_list(task, client):
    await client.chat.completions.create(model="policy", messages=[ask("What")])
    return [1.0]


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
