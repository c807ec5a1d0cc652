"""From a name in a config to a function, a class or another object.

A name is one of a table, `module:Name` or `path/to/file.py:Name`. Texts of files travel with the config (`runner.code_files`: path →
text), so that neither workers nor a resumed run need the file; an object of a notebook travels as an entry whose path ends in
`.pkl` (`rlinf_vl.code.texts`).

What a name must lead to is written as Python: `"score(response, answer, **row)"` for a function that is called so (several ways
joined by `" or "`), `("start(problem)", "close()")` for a class with such methods, `"Family"` for an instance of a class so named.
"""

import ast
import importlib
import inspect
import os
from collections.abc import Mapping, Sequence
from typing import Any

from rlinf_vl.code.texts import CodeError, import_lock, imports_of, module_of_file, source_of, unpickled
from rlinf_vl.errors import nearest

Signature = str | Sequence[str]


def load_code(name: str, table: Mapping[str, str], files: Mapping[str, str], *, what: str, signature: Signature) -> Any:
    """What a name leads to, imported once in a process.

    Args:
        table: registered name → `module:Name`.
        files: `runner.code_files`. A relative path in `name` is one of them if it ends one of their paths; every other file is read
            from the disk.
        what: a noun for messages, such as "environment".
        signature: see the module's docstring; what `table` names isn't looked at.

    Raises:
        CodeError: there is no such thing, or it is of another kind.
    """
    place, attribute = _place_of(name, table, what, signature)
    if place.endswith(".pkl"):
        found = unpickled(name, place, files)
    else:
        try:
            with import_lock:
                module = module_of_file(place, files) if place.endswith(".py") else importlib.import_module(place)
        except (Exception, SystemExit) as error:  # whatever a module does as it is imported
            raise _not_imported(name, place, error, is_ours=name in table) from error
        if not hasattr(module, attribute):
            defined = {n: v for n, v in vars(module).items() if getattr(v, "__module__", None) == module.__name__}
            there = [n for n, v in defined.items() if isinstance(v, type) or _noun(signature) != "class"]
            raise _absent(name, place, attribute, there, signature)
        found = getattr(module, attribute)
    if name not in table and (problem := _misfit(found, attribute, what, signature)):
        raise CodeError(f"{name!r}: {problem}")
    return found


def check_code(
    name: str, table: Mapping[str, str], files: Mapping[str, str], *, what: str, signature: Signature
) -> None:
    """What `load_code` can refuse without running anything, so that code that imports torch is refused at once, too.

    Raises:
        CodeError: as `load_code`.
    """
    place, attribute = _place_of(name, table, what, signature)
    if name in table or place.endswith(".pkl"):
        return
    try:
        tree = ast.parse(source_of(place, files), place)
    except (OSError, SyntaxError, ValueError, ImportError) as error:
        raise _not_imported(name, place, error) from error
    defined = {n.name: n for n in tree.body if isinstance(n, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef)}
    others = {n.id for n in ast.walk(tree) if isinstance(n, ast.Name) and isinstance(n.ctx, ast.Store)}
    others |= {alias.asname or alias.name.partition(".")[0] for n in imports_of(tree) for alias in n.names}
    values = [n for n in tree.body if isinstance(n, ast.Assign) and isinstance(n.value, ast.Constant)]
    others -= {name.id for n in values for name in n.targets if isinstance(name, ast.Name)}  # plain values are no code
    if attribute not in defined:
        if attribute not in others and not others & {"*", "__getattr__"} and "__getattr__" not in defined and tree.body:
            there = [n for n, v in defined.items() if isinstance(v, ast.ClassDef) or _noun(signature) != "class"]
            raise _absent(name, place, attribute, there, signature)
        return
    stub = _stub(defined[attribute])
    if stub is not None and (problem := _misfit(stub, attribute, what, signature)):
        raise CodeError(f"{name!r}: {problem}")


def is_code(name: str) -> bool:
    """Whether a name is written as `module:Name` or `path/to/file.py:Name`."""
    return ":" in name


def _place_of(name: str, table: Mapping[str, str], what: str, signature: Signature) -> tuple[str, str]:
    place, _, attribute = table.get(name, name).rpartition(":")
    if not place or not attribute:
        known = f"there are {', '.join(sorted(table))}; " if table else ""
        raise CodeError(
            f"no {what} {name!r}; {known}write module:Name or path/to/file.py:Name for another ({_wanted(what, signature)});"
            f"{nearest(name, table)}".rstrip(";")
        )
    return place, attribute


def _noun(signature: Signature) -> str:
    if not isinstance(signature, str):
        return "class"
    return "function" if "(" in signature else "object"


def _wanted(what: str, signature: Signature) -> str:
    if not isinstance(signature, str):
        return f"{_a(what)} has {', '.join(signature)}"
    return f"{_a(what)} is called as {signature}" if "(" in signature else f"{_a(what)} is {_a(signature)}"


def _a(noun: str) -> str:
    return f"{'an' if noun[0] in 'aeiou' else 'a'} {noun}"


def _absent(name: str, place: str, attribute: str, there: Sequence[str], signature: Signature) -> CodeError:
    noun = _noun(signature)
    plural = "classes" if noun == "class" else f"{noun}s"
    near = nearest(attribute, there)
    return CodeError(
        f"{name!r}: no {noun} {attribute!r} in {place}; its {plural} are {', '.join(there) or 'none'};{near}".rstrip(
            ";"
        )
    )


def _misfit(found: Any, attribute: str, what: str, signature: Signature) -> str | None:
    """Why this is not what is wanted; None if it is."""
    if not isinstance(signature, str):
        if not isinstance(found, type):
            return f"{attribute} is no class; {_wanted(what, signature)}"
        methods = {call: getattr(found, call.partition("(")[0], None) for call in signature}
        if lacking := [call for call, method in methods.items() if not callable(method)]:
            return f"{attribute} has no {' and no '.join(lacking)}; {_wanted(what, signature)}"
        for call, method in methods.items():
            static = isinstance(inspect.getattr_static(found, call.partition("(")[0], None), staticmethod | classmethod)
            if not _takes(method, call if static else call.replace("(", "(self, ", 1)):
                return f"{attribute}.{_shown(method, call)} can't be called as {call}; {_wanted(what, signature)}"
        return None
    if "(" not in signature:
        names = {cls.__name__ for cls in type(found).__mro__}
        return None if signature in names else f"{attribute} is {_a(type(found).__name__)}; {_wanted(what, signature)}"
    if not callable(found):
        return f"{attribute} is no function; {_wanted(what, signature)}"
    if not any(_takes(found, call) for call in signature.split(" or ")):
        return f"{_shown(found, attribute)} doesn't take these arguments; {_wanted(what, signature)}"
    return None


def _shown(found: Any, name: str) -> str:
    try:
        return f"{name.partition('(')[0]}{inspect.signature(found)}"
    except (TypeError, ValueError):
        return name


def _takes(found: Any, call: str) -> bool:
    """Whether it can be called as `call` says. Where that ends in `**`, it may leave these out, and ask for others by name."""
    there: dict[str, Any] = {}
    exec(f"def {call}: pass", there)
    wanted = inspect.signature(there[call.partition("(")[0]]).parameters.values()
    try:
        taken = inspect.signature(found)
    except (TypeError, ValueError):  # of something written in C
        return True
    positional = [p.name for p in wanted if p.kind is p.POSITIONAL_OR_KEYWORD]
    keywords = {p.name: None for p in wanted if p.kind is p.KEYWORD_ONLY}
    offers_any = any(p.kind is p.VAR_KEYWORD for p in wanted)
    try:
        if offers_any:
            taken.bind_partial(*positional, **keywords)
        else:
            taken.bind(*positional, **keywords)
    except TypeError:
        return False
    return True


def _stub(node: Any) -> Any:
    """A function or class with the parameters of this definition and nothing in it; None where only running it would tell."""
    if node.decorator_list:
        return None
    if isinstance(node, ast.ClassDef):
        if any(getattr(base, "id", None) != "object" for base in node.bases) or node.keywords:
            return None
        members = [_stub(n) for n in node.body if isinstance(n, ast.FunctionDef | ast.AsyncFunctionDef)]
        others = {n.id for n in ast.walk(node) if isinstance(n, ast.Name) and isinstance(n.ctx, ast.Store)}
        if None in members or others:  # a method may be assigned
            return None
        return type(node.name, (), {member.__name__: member for member in members})
    arguments = ast.parse(f"def f({ast.unparse(node.args)}): pass").body[0].args  # type: ignore[attr-defined]
    for one in [*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs, arguments.vararg, arguments.kwarg]:
        if one is not None:
            one.annotation = None
    arguments.defaults = [ast.Constant(None) for _ in arguments.defaults]
    arguments.kw_defaults = [default and ast.Constant(None) for default in arguments.kw_defaults]
    there: dict[str, Any] = {}
    exec(f"def {node.name}({ast.unparse(arguments)}): pass", there)
    return there[node.name]


def _not_imported(name: str, place: str, error: BaseException, is_ours: bool = False) -> CodeError:
    if isinstance(error, OSError) and error.filename and place.endswith(os.path.basename(error.filename)):
        return CodeError(f"{name!r}: no file {error.filename!r} ({error.strerror}); give the path of a Python file")
    at = f", line {error.lineno}" if isinstance(error, SyntaxError) else ""
    install = "pip install 'rlinf_vl[envs]'" if is_ours else "install it where workers run"
    way_out = f"; {install}" if isinstance(error, ModuleNotFoundError) else ""
    return CodeError(f"{name!r}: {place}{at} can't be imported: {type(error).__name__}: {error}{way_out}")
