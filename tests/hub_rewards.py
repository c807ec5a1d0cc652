"""Plays a run's recorded replies again with the packages of hubs alone, and writes both rewards as JSON.

`python hub_rewards.py verifiers FOLDER`, or `python hub_rewards.py openenv FOLDER URL`.
"""

import asyncio
import json
import sys
from pathlib import Path

import pyarrow.parquet as pq


def replies_of(row: dict) -> list[str]:
    """The replies of a trajectory: the toy's texts have no such lines."""
    pieces = row["response"].split("\nassistant\n")
    return [piece.partition("\nuser\n")[0] for piece in pieces]


async def by_verifiers(row: dict) -> float:
    import verifiers as vf
    from replayed_client import replayed_client

    environment = vf.load_environment("verifiers-toy", tries=2)
    own = environment.get_dataset()[int(json.loads(row["labels"])["id"])]
    client = vf.OpenAIChatCompletionsClient(replayed_client(replies_of(row))[0])
    return (await environment.run_rollout(own, client, "policy", {}))["reward"]


async def by_openenv(row: dict, url: str) -> float:
    from openenv.core import GenericEnvClient

    total = 0.0
    async with GenericEnvClient(base_url=url) as client:
        await client.reset(seed=json.loads(row["labels"])["seed"])
        for reply in replies_of(row):
            total += (await client.step({"text": reply.strip()})).reward
    return total


async def main(kind: str, folder: str, *url: str) -> list[list[float]]:
    play = {"verifiers": by_verifiers, "openenv": by_openenv}[kind]
    pairs = []
    for path in sorted(Path(folder).glob("trajectories/step_*.parquet")):
        for row in pq.read_table(path).to_pylist():
            pairs.append([row["reward"], await play(row, *url)])
    return pairs


if __name__ == "__main__":
    print(json.dumps(asyncio.run(main(*sys.argv[1:]))))
