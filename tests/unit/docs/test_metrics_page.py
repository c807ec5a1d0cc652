"""docs/metrics.md has every metric that the code logs, and no other."""

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest
from whole_run import FIXED_METRICS

import rlinf_vl

PACKAGE = Path(rlinf_vl.__file__).parent
PAGE = PACKAGE.parent / "docs/metrics.md"
METRIC = re.compile(
    r"(?:reward|val|agent|actor|mismatch|rollout|packing|data|schedule|sync|time)/[a-z0-9_]+"
)


def metrics_of(tree: ast.Module, phases: set[str]) -> Iterator[str]:
    """Every metric that a file names: literals, and f"room/{name}" for each value of `name`."""
    loops = [node for node in ast.walk(tree) if isinstance(node, (ast.For, ast.comprehension))]
    for node in ast.walk(tree):
        match node:
            case ast.Constant(value=str(text)) if METRIC.fullmatch(text):
                yield text
            case ast.JoinedStr(
                values=[ast.Constant(value=str(room)), ast.FormattedValue(value=ast.Name(id=name))]
            ):
                if not METRIC.fullmatch(f"{room}x"):
                    continue
                values = {
                    constant.value
                    for loop in loops
                    if isinstance(loop.target, ast.Name)
                    and loop.target.id == name
                    and isinstance(loop.iter, ast.Tuple)
                    for constant in loop.iter.elts
                }
                values = phases if room == "time/" else values
                assert values, (
                    f"which metrics is f'{room}{{{name}}}'? name its values in a tuple that a loop goes over"
                )
                yield from (room + value for value in values)


def logged_metrics() -> set[str]:
    trees = [ast.parse(path.read_text(encoding="utf-8")) for path in sorted(PACKAGE.rglob("*.py"))]
    calls = [node for tree in trees for node in ast.walk(tree) if isinstance(node, ast.Call)]

    def first_arguments(method: str) -> set[str]:
        return {
            call.args[0].value
            for call in calls
            if isinstance(call.func, ast.Attribute) and call.func.attr == method
            if call.args and isinstance(call.args[0], ast.Constant)
        }

    phases = first_arguments("timed")
    found = {name for tree in trees for name in metrics_of(tree, phases)}
    # Parts of other metrics, taken out before anything is logged.
    return found - first_arguments("pop")


def documented_metrics() -> list[str]:
    lines = PAGE.read_text(encoding="utf-8").splitlines()
    heads = [
        line.split("|")[1] if line.startswith("|") else line
        for line in lines
        if line.startswith(("### ", "| `"))
    ]
    return [name for head in heads for name in re.findall(r"`([^`]+)`", head)]


@pytest.mark.slow
def test_every_metric_is_documented_and_no_entry_is_stale():
    documented = documented_metrics()
    logged = logged_metrics() | FIXED_METRICS
    assert len(documented) == len(set(documented)), "an entry stands twice"
    assert not logged - set(documented), "docs/metrics.md lacks these"
    assert not set(documented) - logged, "nothing logs these any more"


@pytest.mark.slow
def test_the_collector_sees_each_way_of_naming_a_metric():
    assert {
        "actor/clip_fraction",
        "time/validate",
        "mismatch/no_image",
        "reward/mean",
    } <= logged_metrics()
    assert "actor/tis_square" not in logged_metrics()


def test_every_entry_says_what_is_healthy_and_what_to_do_otherwise():
    rows = [line for line in PAGE.read_text(encoding="utf-8").splitlines() if line[:3] == "| `"]
    for row in rows:
        cells = [cell.strip() for cell in re.split(r"(?<!\\)\|", row)[1:-1]]
        assert len(cells) == 3 and all(cells), row
