"""What each extra of pyproject.toml can do alone: with the core and what it brings itself, and with nothing else.

`ALONE` is the list. A program runs in a process whose imports are blocked but for these packages: `run_alone` in
one that has most of the project loaded, so that a program takes a moment; `python tests/extras.py NAME` in a new one,
such as the Python of a fresh environment.
"""

import os
import sys
import tomllib
import traceback
from functools import cache
from importlib.metadata import PackageNotFoundError, distribution, packages_distributions
from pathlib import Path

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).resolve().parents[1]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
#: Extra → (what it is for, a program that does it).
ALONE = {
    "agents": (
        "an agent's function, command and task app find their driver, and a function calls the policy",
        """
import asyncio, tempfile
from types import SimpleNamespace
from rlinf_vl.extras.agents.chat import Reply
from rlinf_vl.extras.agents.drivers import FunctionDriver
from rlinf_vl.extras.agents.endpoint import Endpoint
from rlinf_vl.config import load_config
from rlinf_vl.tools.check.inputs import libraries_missing
from rlinf_vl.rollout.episode.env_executor import ThreadExecutor
from rlinf_vl.rollout.episode.group_player import EpisodeSettings
from rlinf_vl.extras.agents.make import make_player
path = tempfile.mkdtemp() + "/agent.py"
open(path, "w").write('''
async def solve(task, client):
    messages = [{"role": "user", "content": "6 x 7?"}]
    reply = await client.chat.completions.create(model="policy", messages=messages)
    return 1.0 if "42" in reply.choices[0].message.content else 0.0
''')
config = load_config("toy-grpo-cpu", ["cluster.backend=local"])
agent = config.rollout.agent
for agent.function, agent.command, agent.app in (
    (f"{path}:solve", [], None), (None, ["true"], None), (None, [], "http://127.0.0.1:9")
):
    assert not list(libraries_missing(config)), list(libraries_missing(config))
    make_player(config, None, EpisodeSettings(), None, None)
class Session:
    images, video = {}, config.data.video
    async def complete(self, chat):
        return Reply("reply", "It is 42", "", (), "stop", 1, 1)
async def call():
    endpoint = Endpoint()
    await endpoint.start()
    driver = FunctionDriver(f"{path}:solve", {}, ThreadExecutor(60.0))
    assert await driver.run(SimpleNamespace(), endpoint.url, endpoint.open(Session())) == 1.0
    endpoint.close()
    await endpoint.wait_closed()
asyncio.run(call())
""",
    ),
    "browser": (
        "a browser is driven, and the pages of MiniWoB++ are there",
        """
import playwright.async_api
from rlinf_vl.extras.browser.env import Browser, _miniwob_folder
assert list(_miniwob_folder().glob("miniwob/*.html"))
""",
    ),
    "docs": (
        "the pages are built",
        """
from mkdocs.config import load_config
load_config("mkdocs.yml")
""",
    ),
    "envs": (
        "games of Gymnasium are played, and environments of other machines are called",
        """
import rlinf_vl.extras.remote.env
from rlinf_vl.envs.registry import EnvMaker
from rlinf_vl.types import Problem
for id in ("FrozenLake-v1", "minigrid:MiniGrid-Empty-5x5-v0"):
    make = EnvMaker("gymnasium", {"id": id}, {}, lambda *_: False, 1.0, 0.0)
    env = make(Problem("row", (), ""), 1, 2)
    assert env.start(Problem("row", (), "")) and env.step("left")
    env.close()
import crafter
""",
    ),
    "fla": ("kernels of gated delta nets", "from fla.ops.gated_delta_rule import chunk_gated_delta_rule"),
    "notebook": (
        "a run in a notebook shows its progress",
        """
import ipykernel, jupyterlab
from rlinf_vl.observe.notebook import NotebookProgress
NotebookProgress()
""",
    ),
    "openenv": (
        "environments of an OpenEnv server",
        """
from rlinf_vl.envs.registry import EnvMaker
from rlinf_vl.types import Problem
make = EnvMaker("openenv:http://127.0.0.1:9", {}, {}, lambda *_: False, 1.0, 0.0)
make(Problem("row", (), ""), 1, 2).close()
""",
    ),
    "qlora": ("weights in nf4", "from rlinf_vl.models.nf4 import try_on; try_on('cpu')"),
    "s3": (
        "checkpoints in an S3 store",
        """
from rlinf_vl.runtime.checkpoints import folder_at
folder_at("s3://bucket/folder").fs
""",
    ),
    "sglang": ("an engine of SGLang", "import rlinf_vl.engines.sglang.engine, sglang.srt.managers.io_struct"),
    "trackio": ("a tracker", "import trackio"),
    "verifiers": (
        "environments of verifiers run as agents",
        """
import rlinf_vl.extras.verifiers.agent, starlette.applications, uvicorn, verifiers
from rlinf_vl.config import load_config
from rlinf_vl.rollout.episode.group_player import EpisodeSettings
from rlinf_vl.extras.agents.make import make_player
""",
    ),
    "wandb": ("a tracker", "import wandb; wandb.init(mode='disabled').finish()"),
}  # fmt: skip
#: Modules that most programs need: loaded before a process is split off for each of them.
_SHARED = ("rlinf_vl.rollout.episode.group_sampler", "rlinf_vl.rollout.episode.group_player")


@cache
def _owners() -> dict[str, list[str]]:
    """The packages of each module that is installed here."""
    return dict(packages_distributions())


def closure(requirements: list[str]) -> set[str]:
    """The names of the packages that these requirements bring along, as they are installed here."""
    return {canonicalize_name(requirement.name) for requirement in brought_along(requirements)}


def constraints() -> str:
    """What the core and all that it brings along demand of versions, as a file for installers."""
    lines = {
        f"{requirement.name}{requirement.specifier}"
        for requirement in brought_along(PROJECT["dependencies"])
        if requirement.specifier
    }
    return "\n".join(sorted(lines))


def brought_along(requirements: list[str]) -> list[Requirement]:
    """The requirements, and all those of the packages that meet them, as they are installed here."""
    everything = []
    extras: dict[str, set[str]] = {}
    waiting = [Requirement(text) for text in requirements]
    while waiting:
        requirement = waiting.pop()
        everything.append(requirement)
        name = canonicalize_name(requirement.name)
        new = {"", *requirement.extras} - extras.get(name, set())
        extras.setdefault(name, set()).update(new)
        try:
            brought = (
                [Requirement(text) for text in distribution(name).requires or ()] if new else []
            )
        except PackageNotFoundError:  # for another system, or a Python of another version
            continue
        for further in brought:
            marker, further.marker = further.marker, None
            if marker is None or any(marker.evaluate({"extra": extra}) for extra in new):
                waiting.append(further)
    return everything


def allowed(extra: str) -> set[str]:
    """The packages of the core and of an extra."""
    requirements = PROJECT["dependencies"] + PROJECT["optional-dependencies"][extra]
    return closure(requirements) | {"pip", "setuptools"}  # which environments have anyway


def missing(extra: str) -> list[str]:
    """The packages of an extra that are not installed here."""
    absent = []
    for text in PROJECT["optional-dependencies"][extra]:
        try:
            distribution(Requirement(text).name)
        except PackageNotFoundError:
            absent.append(Requirement(text).name)
    return absent


class Blocker:
    """Finds modules as the usual finders do, but for those of packages that are not allowed."""

    def __init__(self, names: set[str]) -> None:
        self._names, self._finders = names | {"rlinf-vl"}, list(sys.meta_path)
        self._blocked = {
            module
            for module, owners in _owners().items()
            if self._names.isdisjoint(map(canonicalize_name, owners))
        }

    def install(self) -> None:
        """Block imports from now on, and forget modules that are loaded already."""
        for module in list(sys.modules):
            if module.partition(".")[0] in self._blocked:
                del sys.modules[module]
        sys.meta_path[:] = [self]

    def find_spec(self, module, path=None, target=None):
        if module.partition(".")[0] in self._blocked:
            return None
        specs = (finder.find_spec(module, path, target) for finder in self._finders)
        return next(filter(None, specs), None)

    def find_distributions(self, context):
        for finder in self._finders:
            for found in getattr(finder, "find_distributions", lambda context: ())(context):
                if canonicalize_name(found.name) in self._names:
                    yield found

    def invalidate_caches(self) -> None:
        for finder in self._finders:
            getattr(finder, "invalidate_caches", lambda: None)()


def run_alone(extra: str) -> None:
    """Run an extra's program with its own packages only."""
    Blocker(allowed(extra)).install()
    exec(compile(ALONE[extra][1], f"<{extra}>", "exec"), {"__name__": "__main__"})


def main(extras: list[str]) -> int:
    """Run the programs of extras, each in a process of its own; returns how many fail."""
    failed = 0
    if len(extras) > 1:
        for module in _SHARED:
            __import__(module)
    _owners()
    for extra in extras:
        if pid := os.fork():
            failed += os.waitpid(pid, 0)[1] != 0
            continue
        try:
            run_alone(extra)
        except BaseException:
            print(f"the extra {extra} fails alone:\n{traceback.format_exc()}", file=sys.stderr)
            os._exit(1)
        os._exit(0)
    return failed


if __name__ == "__main__":
    sys.path.insert(0, str(ROOT))
    sys.exit(main(sys.argv[1:]))
