"""Everything public says what it is: modules, classes, functions and methods without a leading underscore.

Not asked for: sections of the config (each of their fields is documented where it stands, see test_config_keys), methods that
a documented base class or a protocol of the same folder describes, and properties that are one expression.
"""

import ast
from collections.abc import Iterator
from pathlib import Path

import rlinf_vl

PACKAGE = Path(rlinf_vl.__file__).parent
MODULES = {path: ast.parse(path.read_text(encoding="utf-8")) for path in sorted(PACKAGE.rglob("*.py"))}
Function = ast.FunctionDef | ast.AsyncFunctionDef


def public(body: list[ast.stmt], *kinds: type) -> Iterator[ast.ClassDef | Function]:
    for node in body:
        if isinstance(node, kinds) and not node.name.startswith("_"):
            yield node


def base_names(node: ast.ClassDef) -> set[str]:
    return {ast.unparse(base).split("[")[0].split(".")[-1] for base in node.bases}


def documented_by(tree: ast.Module, wanted: str | None = None) -> dict[str, set[str]]:
    """Class → its documented methods, of the classes that have `wanted` as a base (None: all)."""
    return {
        node.name: {method.name for method in public(node.body, *Function.__args__) if ast.get_docstring(method)}
        for node in public(tree.body, ast.ClassDef)
        if wanted is None or wanted in base_names(node)
    }


def is_plain_property(node: Function) -> bool:
    decorators = {ast.unparse(decorator) for decorator in node.decorator_list}
    return bool(decorators & {"property", "cached_property"}) and len(node.body) == 1


def undocumented(path: Path, tree: ast.Module) -> Iterator[str]:
    classes = {name: methods for other in MODULES.values() for name, methods in documented_by(other).items()}
    neighbours = [documented_by(other, "Protocol") for where, other in MODULES.items() if where.parent == path.parent]
    protocols = set().union(*(methods for module in neighbours for methods in module.values()))
    if tree.body and not ast.get_docstring(tree):
        yield f"{path}: the module"
    for node in public(tree.body, ast.ClassDef, *Function.__args__):
        if not ast.get_docstring(node) and path != PACKAGE / "config" / "schema.py":
            yield f"{path}:{node.lineno}: {node.name}"
        if isinstance(node, ast.ClassDef):
            described = set(protocols) if "Protocol" not in base_names(node) else set()
            described = described.union(*(classes.get(base, set()) for base in base_names(node)))
            for method in public(node.body, *Function.__args__):
                if not (ast.get_docstring(method) or method.name in described or is_plain_property(method)):
                    yield f"{path}:{method.lineno}: {node.name}.{method.name}"


def test_everything_public_has_a_docstring():
    missing = [line for path, tree in MODULES.items() for line in undocumented(path, tree)]
    assert not missing, "without a docstring:\n" + "\n".join(missing)


def test_a_missing_docstring_is_found():
    source = (
        "class A:\n  def said(self):\n    'x'\n  def silent(self): ...\n  @property\n  def plain(self):\n    return 1\n"
        "def _private(): ...\ndef loud():\n  'y'\n"
    )
    path = PACKAGE / "made_up.py"
    assert list(undocumented(path, ast.parse(source))) == [
        f"{path}: the module",
        f"{path}:1: A",
        f"{path}:4: A.silent",
    ]
