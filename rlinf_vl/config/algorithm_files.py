"""The built-in losses and advantage estimators: a file each in a folder of `rlinf_vl/algorithms`.

A file's constants say which keys of `algorithm` its choice sets and reads. They are taken from its
text: importing it imports torch, which takes seconds, and a mistake in a config is reported before.
"""

import ast
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

_FOLDER = Path(__file__).parents[1] / "algorithms"


@dataclass(frozen=True)
class BuiltIn:
    """A built-in loss or advantage estimator; the folders' docstrings describe the constants."""

    docstring: str
    defaults: dict[str, Any] = field(default_factory=dict)
    clips: tuple[str, ...] = ()
    needs_groups: bool = False
    compares_states: bool = False
    needs_minibatch: bool = False


@cache
def built_ins(folder: str) -> dict[str, BuiltIn]:
    """Return what is in `losses` or `estimators`, by name."""
    table: dict[str, BuiltIn] = {}
    for path in sorted((_FOLDER / folder).glob("[a-z]*.py")):
        tree = ast.parse(path.read_text(encoding="utf-8"))
        constants = {}
        for node in tree.body:
            if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name):
                constants[node.targets[0].id.lower()] = ast.literal_eval(node.value)
        table[path.stem] = BuiltIn(ast.get_docstring(tree) or "", **constants)
    return table
