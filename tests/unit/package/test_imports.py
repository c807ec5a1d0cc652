"""Arrows between rooms go one way: who may import whom is `ROOMS`, and docs/architecture.md shows the same table."""

import ast
import re
from collections.abc import Iterator
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

import rlinf_vl

PACKAGE = Path(rlinf_vl.__file__).parent
#: Room → the rooms that it may import; `user_code`, `errors` and `types` are known everywhere but in `algorithms`.
ROOMS = {
    "algorithms": set(),
    "user_code": set(),
    "errors": set(),
    "types": set(),
    "config": {"weights"},
    "convert": {"config"},
    "runtime": {"config"},
    "data": {"config", "runtime"},
    "rewards": {"data"},
    "envs": {"config", "data", "rewards"},
    "agents": {"config", "data", "envs", "rewards"},
    "models": {"data"},
    "packing": {"models"},
    "transport": set(),
    "weights": {"transport"},
    "observe": {"config", "data", "runtime"},
    "engines": {"config", "models", "observe", "runtime", "weights"},
    "rollout": {
        "agents", "config", "data", "engines", "envs", "models", "observe", "rewards", "runtime", "transport", "weights",
    },
    "actor": {
        "algorithms", "config", "data", "models", "observe", "packing", "runtime", "transport", "weights",
    },
    "toy": {"config", "data", "envs", "models", "runtime"},
    "check_agent": {"agents", "config", "data", "engines", "models", "rewards", "rollout", "toy"},
    "check_data": {"config", "data", "envs", "models", "preflight", "rollout", "runtime", "toy"},
    "prove": {
        "actor", "config", "controller", "data", "engines", "models", "observe", "packing", "rollout", "transport",
    },
    "smoke": {
        "actor", "config", "controller", "local", "models", "observe", "preflight", "rollout", "runtime", "toy",
    },
    "replay": {
        "actor", "algorithms", "config", "controller", "data", "engines", "local", "models", "observe", "packing",
        "prove", "rollout", "runtime", "weights",
    },
    "compare": {"algorithms", "config", "rewards"},
    "sweep": {"config", "observe", "preflight", "report", "runtime"},
    "report": {"config", "observe", "runtime"},
    "look": {"config", "controller", "data", "models", "observe", "packing", "report", "runtime"},
    "preflight": {
        "actor", "config", "data", "engines", "envs", "models", "packing", "rewards", "runtime", "toy", "weights",
    },
    "controller": {
        "actor", "algorithms", "config", "data", "engines", "envs", "models", "observe", "packing", "rollout", "runtime",
        "toy", "transport", "weights",
    },
    "local": {
        "actor", "config", "controller", "data", "engines", "envs", "models", "observe", "rewards", "rollout", "runtime",
        "toy", "weights",
    },
}  # fmt: skip
ANYONE = {"user_code", "errors", "types"}
#: Files that import a room above theirs, within a function, for an error that is being made.
ONLY_FOR_ERRORS = {"config/keys.py": "convert", "config/load.py": "convert"}
#: The command line, and what it shares with Python: they import whatever they need.
TOP = {"__main__", "__init__", "api", "cli", "policy", "publish", "serve", "entry", "trial"}


def imported(path: Path) -> Iterator[str]:
    """Modules of this package that a file imports, wherever in it."""
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names if alias.name.startswith("rlinf_vl."))
        elif isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "rlinf_vl":
            for alias in node.names:
                inner = f"{node.module}.{alias.name}"
                base = PACKAGE / Path(*inner.split(".")[1:])
                yield (
                    inner
                    if base.with_suffix(".py").exists() or (base / "__init__.py").exists()
                    else node.module
                )


def name_of(path: Path) -> str:
    parts = ("rlinf_vl", *path.relative_to(PACKAGE).with_suffix("").parts)
    return ".".join(parts).removesuffix(".__init__")


FILES = sorted(PACKAGE.rglob("*.py"))


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.relative_to(PACKAGE).as_posix())
def test_no_arrow_goes_up(path):
    relative = path.relative_to(PACKAGE)
    room = relative.parts[0].removesuffix(".py")
    if room in TOP:
        return
    allowed = ROOMS[room] | {room} | (set() if room == "algorithms" else ANYONE)
    allowed |= {ONLY_FOR_ERRORS.get(relative.as_posix(), room)}
    found = {module.split(".")[1] for module in imported(path) if "." in module}
    assert found <= allowed, f"{room} may not import {sorted(found - allowed)}"


@pytest.mark.slow
def test_no_circle():
    known = {name_of(path) for path in FILES}
    graph = {
        name_of(path): {m for m in imported(path) if m in known and m != name_of(path)}
        for path in FILES
    }
    try:
        TopologicalSorter(graph).prepare()
    except CycleError as error:
        pytest.fail(f"import circle: {' → '.join(error.args[1])}")


def test_the_page_shows_these_rooms():
    page = (PACKAGE.parent / "docs/architecture.md").read_text(encoding="utf-8")
    rows = dict(
        re.findall(r"^\| `rlinf_vl/(\w+)(?:/|\.py)` \|[^|]*\| ([^|]*) \|$", page, re.MULTILINE)
    )
    shown = {room: set(re.findall(r"\w+", cell)) for room, cell in rows.items()}
    assert shown == {room: allowed for room, allowed in ROOMS.items()}
