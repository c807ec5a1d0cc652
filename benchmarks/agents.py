"""What an agent's endpoint costs: a step of the maze played three ways, and calls a second with an engine that does nothing.

    python benchmarks/agents.py

A step's rollout of the toy's maze on the embedded engine: by its environment in the worker's process, by its environment in a
process beside it (rollout.env_processes), and by an agent's function that calls the endpoint. The three take turns, and print their
median seconds, each with its ratio to the first. Then --clients agents call the endpoint --calls times in all, one call after the
other, of an engine that answers at once with eight tokens.
"""

import argparse
import asyncio
import json
import logging
import statistics
import time
from concurrent.futures import Future
from pathlib import Path

import numpy as np
import torch

from rlinf_vl.config import load_config
from rlinf_vl.config.schema import Config
from rlinf_vl.driver.local.pool import DirectStore
from rlinf_vl.extras.agents.contract import AgentTask
from rlinf_vl.extras.agents.endpoint import Endpoint
from rlinf_vl.extras.agents.first_calls import FirstCalls
from rlinf_vl.extras.agents.function_driver import ProcessFunctionDriver
from rlinf_vl.extras.agents.session import AgentLimits, AgentSession
from rlinf_vl.extras.toy.checkpoint import toy_checkpoint_path
from rlinf_vl.models.families import family_of
from rlinf_vl.models.processing import Processor
from rlinf_vl.rollout.episode.env_makers import scorer_of
from rlinf_vl.rollout.episode.generation_client import GenerationClient
from rlinf_vl.rollout.episode.group_sampler import GroupSampler
from rlinf_vl.rollout.episode.renderer import Renderer
from rlinf_vl.rollout.episode.rollout_state import RolloutState
from rlinf_vl.rollout.submission import Task
from rlinf_vl.types import Completion, Problem, Request, Sample, SamplingParams

ROOT = Path(__file__).resolve().parents[1]
WAYS = {
    "environment": [],
    "env_processes": ["rollout.env_processes=1"],
    "agent": [
        "rollout.env_class=single_turn",
        f"rollout.agent.function={ROOT / 'examples/agents/maze.py'}:solve",
        "rollout.agent.max_concurrent=null",
    ],
}


def sampler_of(overrides: list[str], supervised: int | None) -> GroupSampler:
    config: Config = load_config("toy-maze-cpu", overrides)
    path = str(toy_checkpoint_path("toy-maze", steps=supervised))
    return GroupSampler(config, path, "cpu", scorer=scorer_of(config), store=DirectStore())


async def rollout_seconds(sampler: GroupSampler, step: int, groups: int, samples: int) -> float:
    """Play a step's groups; every way plays the same mazes with the same seeds."""
    tasks = []
    for number in range(groups):
        first_seed = (step * groups + number) * samples
        seeds = tuple(range(first_seed, first_seed + samples))
        tasks.append(Task(f"g{step}-{number}", "train", number, seeds, group_seed=first_seed))
    start = time.perf_counter()
    n_turns = 0
    async for arrived in sampler.generate(tasks):
        for group in arrived:
            assert all(t.error is None for t in group.summary.trajectories), group.summary
            n_turns += sum(t.turns for t in group.summary.trajectories)
    assert n_turns >= groups * samples
    return time.perf_counter() - start


async def compare_ways(
    steps: int, groups: int, samples: int, supervised: int | None
) -> dict[str, float]:
    samplers = {name: sampler_of(overrides, supervised) for name, overrides in WAYS.items()}
    seconds: dict[str, list[float]] = {name: [] for name in samplers}
    try:
        for step in range(steps + 1):
            for name, sampler in samplers.items():
                took = await rollout_seconds(sampler, step, groups, samples)
                if step:  # the first one starts processes and imports
                    seconds[name].append(took)
                    print(f"step {step:2} {name:14} {took:6.2f} s", flush=True)
    finally:
        for sampler in samplers.values():
            sampler.close()
    figures = {f"seconds_{name}": statistics.median(took) for name, took in seconds.items()}
    for name in list(WAYS)[1:]:
        pairs = zip(seconds[name], seconds["environment"], strict=True)
        figures[f"ratio_{name}"] = statistics.median(own / native for own, native in pairs)
    return figures


class DoNothing:
    """An engine that answers at once."""

    prefilled_tokens = 0

    def submit(self, requests: list[Request]) -> list[Future[Completion]]:
        sample = Sample(
            np.arange(100, 108, dtype=np.int32),
            np.zeros(8, np.float32),
            np.zeros(8, np.int32),
            "length",
        )
        futures: list[Future[Completion]] = []
        for request in requests:
            futures.append(Future())
            futures[-1].set_result(Completion((sample,) * len(request.seeds)))
        return futures

    def end_sessions(self, names: list[str]) -> None:
        pass

    def alive(self, timeout_s: float) -> bool:
        return True


async def call_often(task: AgentTask, client) -> float:
    """An agent that asks again and again; each question is a conversation of its own."""
    for number in range(task.seed):
        await client.chat.completions.create(
            model="policy", messages=[{"role": "user", "content": f"Question {number}?"}]
        )
    return 1.0


async def calls_per_second(calls: int, clients: int) -> float:
    processor = Processor(str(toy_checkpoint_path()), family_of("qwen3_vl"))
    client = GenerationClient(DoNothing(), Renderer(processor), 30.0)
    sampling = SamplingParams(max_new_tokens=8, stop_ids=processor.stop_ids)
    endpoint = Endpoint()
    await endpoint.start()
    driver = ProcessFunctionDriver(f"{Path(__file__).resolve()}:call_often", {}, 600.0, 1)
    each = calls // clients

    async def play(number: int, n_calls: int) -> None:
        problem = Problem(f"p{number}", (), "")
        limits = AgentLimits(n_calls, 10**9)
        session = AgentSession(
            RolloutState(problem, number, session=""),
            sampling,
            client,
            limits,
            FirstCalls(client),
        )
        key = endpoint.open(session)
        await driver.run(AgentTask(problem, n_calls, 0), endpoint.url, key)
        endpoint.end(key)
        await session.close()
        assert session.metrics["agent/calls"] == n_calls

    await play(-1, 2)  # imports
    start = time.perf_counter()
    await asyncio.gather(*(play(number, each) for number in range(clients)))
    seconds = time.perf_counter() - start
    driver.close()
    endpoint.close()
    await endpoint.wait_closed()
    return each * clients / seconds


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=5)
    parser.add_argument("--groups", type=int, default=16)
    parser.add_argument("--samples", type=int, default=8, help="episodes of a group")
    parser.add_argument("--calls", type=int, default=2000)
    parser.add_argument("--clients", type=int, default=32)
    parser.add_argument(
        "--supervised", type=int, help="steps of the toy's warm start (default: all of them)"
    )
    parser.add_argument("--json", type=Path, help="write the figures here")
    args = parser.parse_args()
    torch.set_num_threads(1)
    logging.getLogger("rlinf_vl").setLevel(logging.ERROR)
    figures = asyncio.run(compare_ways(args.steps, args.groups, args.samples, args.supervised))
    figures["calls_per_second"] = asyncio.run(calls_per_second(args.calls, args.clients))
    for name, value in figures.items():
        print(f"{name:24} {value:.3f}")
    if args.json:
        args.json.write_text(json.dumps(figures))


if __name__ == "__main__":
    main()
