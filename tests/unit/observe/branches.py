"""A run whose trajectory has branches, as an agent makes them through the endpoint, for tests of what is recorded and shown."""

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import scripted_agents
from agent_groups import play
from episodes import encoded, picture
from scripted_engine import Scripted

from rlinf_vl.extras.agents.drivers import FunctionDriver
from rlinf_vl.extras.agents.player import AgentPlayer
from rlinf_vl.extras.agents.session import AgentLimits
from rlinf_vl.models.families import family_of
from rlinf_vl.models.processing import Processor
from rlinf_vl.observe.trajectories import TrajectoryStore
from rlinf_vl.rollout.episode.env_executor import ThreadExecutor
from rlinf_vl.rollout.episode.generation_client import GenerationClient
from rlinf_vl.rollout.episode.group_player import EpisodeSettings
from rlinf_vl.rollout.episode.renderer import Renderer
from rlinf_vl.types import Problem, SamplingParams

SHOWN = encoded(picture(48, 64, 9))
PARTS = [{"type": "image_url", "image_url": {"url": SHOWN.url}}, {"type": "text", "text": "What"}]
PROBLEM = Problem("p:0", ({"role": "user", "content": PARTS},), "18", (SHOWN,))
ANSWERS = ["\\boxed{17}", "x = 4", "\\boxed{18}", "\\boxed{19}", "\\boxed{7}", "I do not know."]


def branching_group(checkpoint: Path):
    """A group of one trajectory of six calls: turn 4 goes on from turn 2, turns 5 and 6 begin anew."""
    processor = Processor(checkpoint, family_of("qwen3_vl"))
    client = GenerationClient(Scripted(processor, ANSWERS), Renderer(processor), 30.0)
    driver = FunctionDriver(f"{scripted_agents.__file__}:branching", {}, ThreadExecutor(120.0))
    limits = AgentLimits(20, 4096)
    player = AgentPlayer(client, EpisodeSettings(), driver, limits, (0.0, 1.0))
    sampling = SamplingParams(max_new_tokens=50, stop_ids=processor.stop_ids)
    # In a thread: a browser's test has an event loop of its own here.
    with ThreadPoolExecutor(1) as thread:
        (group,) = thread.submit(play, player, [[1]], sampling, PROBLEM).result()
    return group


def make_branches(folder: Path, checkpoint: Path) -> Path:
    """The folder of a run with this trajectory."""
    group = branching_group(checkpoint)
    (trajectory,) = group.trajectories
    assert trajectory.error is None, trajectory.error
    folder.mkdir(parents=True)
    store = TrajectoryStore(folder, str(checkpoint), "<|image_pad|>", 10**9)
    logprobs = np.full(trajectory.n_response_tokens, -1.0, np.float32)
    store.add(1, "train", group, [(0.5,) * len(trajectory.turns)], {0: logprobs})
    store.write(1)
    (folder / "metrics.jsonl").write_text('{"step": 1, "reward/mean": 1.0, "time/step": 2.0}\n')
    (folder / "config.yaml").write_text("runner:\n  experiment_name: branches\n  max_steps: 1\n")
    return folder
