"""Edits of one node of a source file, found by its function's name and its syntax tree, wherever the code has moved."""

import ast
from collections.abc import Iterator
from functools import cache
from pathlib import Path

Node = ast.expr | ast.stmt


class DoesNotApply(Exception):
    """An edit whose place is missing or not the only one."""


def scopes(tree: ast.Module) -> Iterator[tuple[str, ast.AST]]:
    """Yield each function and class with its name, such as `GroupStore.put`; the module itself has none."""
    queue: list[tuple[str, ast.AST]] = [("", tree)]
    while queue:
        name, scope = queue.pop()
        yield name, scope
        nodes = list(ast.iter_child_nodes(scope))
        while nodes:
            node = nodes.pop()
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
                queue.append((f"{name}.{node.name}".lstrip("."), node))
            else:
                nodes += ast.iter_child_nodes(node)


@cache
def scopes_of(source: str) -> list[tuple[str, ast.AST]]:
    """Return the `scopes` of a source."""
    return list(scopes(ast.parse(source)))


def parsed(code: str) -> Node:
    """Return the only statement of a piece of code, or its expression if it is one."""
    (statement,) = ast.parse(code).body
    return statement.value if isinstance(statement, ast.Expr) else statement


def equal_nodes(scope: ast.AST, code: str) -> list[Node]:
    """Return the expressions or statements within a scope that are the same code, however it is laid out."""
    looked_for = parsed(code)
    dump = ast.dump(looked_for)
    return [
        node
        for node in ast.walk(scope)
        if type(node) is type(looked_for) and ast.dump(node) == dump
    ]


def find(root: Path, place: str, code: str) -> tuple[Path, Node]:
    """Return the file below `root` and the node that is this code, in the function or class `place`.

    Raises:
        DoesNotApply: there is no such node, or more than one.
    """
    found = []
    for path in sorted(root.rglob("*.py")):
        source = path.read_text(encoding="utf-8")
        if place.rpartition(".")[2] in source:
            for name, scope in scopes_of(source):
                if name == place:
                    found += [(path, node) for node in equal_nodes(scope, code)]
    if len(found) != 1:
        places = ", ".join(f"{path.relative_to(root)}:{node.lineno}" for path, node in found)
        raise DoesNotApply(f"in {place or 'a module'} stands {places or 'nowhere'}:\n{code}")
    return found[0]


def replaced(source: str, node: ast.AST, code: str) -> str:
    """Return a source in which a node's text is this code; code of several lines is indented as the node is."""
    lines = source.encode().splitlines(keepends=True)
    first, last = node.lineno - 1, node.end_lineno - 1  # pyright: ignore[reportAttributeAccessIssue]
    start, end = node.col_offset, node.end_col_offset  # pyright: ignore[reportAttributeAccessIssue]
    indented = code.replace("\n", "\n" + " " * start).encode()
    text = lines[first][:start] + indented + lines[last][end:]
    return b"".join([*lines[:first], text, *lines[last + 1 :]]).decode()
