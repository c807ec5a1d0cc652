"""Arrows between storeys and rooms go one way: docs/architecture.md says who may import whom."""

import ast
import importlib
import re
from collections.abc import Iterator
from functools import cache
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

import rlinf_vl
from rlinf_vl.config.parts import PARTS

PACKAGE = Path(rlinf_vl.__file__).parent
FILES = sorted(PACKAGE.rglob("*.py"))
ANYONE = {"user_code", "errors", "types"}
#: The command line's start, which the core's table leaves out.
START = {"__main__": {"cli", "observe", "runtime"}, "__init__": {"driver"}}
STOREYS = ("extras", "tools")
#: A name in a table of the core.
PLACE = re.compile(r"rlinf_vl(\.\w+)+:\w+")


def tables() -> Iterator[tuple[str, str]]:
    """Each row of the page's tables: a room, such as `data` or `tools/check`, and its last cell."""
    page = (PACKAGE.parent / "docs/architecture.md").read_text(encoding="utf-8")
    for room, cells in re.findall(
        r"^\| `rlinf_vl/([\w/]+?)(?:/|\.py)` \|(.*)\|$", page, re.MULTILINE
    ):
        yield room, cells.rpartition("|")[2]


#: Room of the core → the rooms that it may import.
CORE = {room: set(re.findall(r"\w+", cell)) for room, cell in tables() if "/" not in room} | START


def imported(path: Path) -> Iterator[str]:
    """Modules of this package that a file imports, wherever in it."""
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names if alias.name.startswith("rlinf_vl."))
        elif isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "rlinf_vl":
            for alias in node.names:
                inner = f"{node.module}.{alias.name}"
                yield inner if is_module(inner) else node.module


@cache
def is_module(name: str) -> bool:
    base = PACKAGE / Path(*name.split(".")[1:])
    return base.with_suffix(".py").exists() or (base / "__init__.py").exists()


def name_of(path: Path) -> str:
    parts = ("rlinf_vl", *path.relative_to(PACKAGE).with_suffix("").parts)
    return ".".join(parts).removesuffix(".__init__")


def room_of(module: str) -> str:
    """The room of a module: `data`, `tools/check`."""
    _, *parts = module.split(".")
    return "/".join(parts[: 2 if parts[:1] and parts[0] in STOREYS else 1])


def test_no_arrow_goes_up():
    problems = []
    for path in FILES:
        name = name_of(path)
        room = room_of(name) or "__init__"
        if room in STOREYS:
            continue
        rooms = {room_of(module) for module in imported(path)} - {room, ""} - ANYONE
        if room.startswith(("extras/", "tools/")):
            forbidden = {r for r in rooms if r.startswith("tools")}
        else:
            forbidden = rooms - CORE[room]
        if room == "algorithms":
            forbidden |= {room_of(module) for module in imported(path)} & ANYONE
        problems += [f"{name} may not import {other}" for other in sorted(forbidden)]
    assert not problems


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


def test_the_page_has_every_room():
    rooms = {room_of(name_of(path)) for path in FILES} - {"", *STOREYS, "__main__"}
    assert {room for room, _ in tables()} == rooms


def places() -> Iterator[str]:
    """The names in the core's tables."""
    for path in FILES:
        if not room_of(name_of(path)).startswith(STOREYS):
            for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
                if isinstance(node, ast.Constant) and isinstance(node.value, str):
                    yield from (m[0] for m in PLACE.finditer(node.value) if "/" not in node.value)


@pytest.mark.parametrize("place", sorted(set(places())))
def test_a_name_in_a_table_leads_somewhere(place):
    module, _, attribute = place.partition(":")
    assert hasattr(importlib.import_module(module), attribute)


def test_each_part_that_is_asked_for_is_in_the_table():
    names = {
        text.value
        for path in FILES
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if isinstance(node, ast.Call) and getattr(node.func, "id", "") == "load_part"
        for text in ast.walk(node.args[0])
        if isinstance(text, ast.Constant)
    }
    assert names == PARTS.keys()


def test_episodes_need_neither_the_pool_nor_ray():
    for path in (PACKAGE / "rollout/episode").rglob("*.py"):
        assert not [m for m in imported(path) if m.startswith("rlinf_vl.rollout.pool")], path
        assert not re.search(r"^\s*(import|from) ray\b", path.read_text(encoding="utf-8"), re.M)
