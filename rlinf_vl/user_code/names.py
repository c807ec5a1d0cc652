"""From a name in a config to a function, a class or another object.

A name is one of a table, `module:Name` or `path/to/file.py:Name`. Texts of files travel with the
config (`runner.code_files`: path → text), so that neither workers nor a resumed run need the file.
An object of a notebook travels as an entry whose path ends in `.pkl` (`rlinf_vl.user_code.texts`).

The required signature of a name is written as Python: `"score(response, answer, **row)"` for a
function that is called so (alternatives joined by `" or "`), `("start(problem)", "close()")` for a
class with such methods, `"Family"` for an instance of a class of that name.
"""

import ast
import importlib
import inspect
import os
from collections.abc import Mapping, Sequence
from typing import Any

from rlinf_vl.errors import nearest, pip_install
from rlinf_vl.user_code.texts import (
    CodeError,
    import_lock,
    imports_of,
    module_of_file,
    source_of,
    unpickled,
)

Signature = str | Sequence[str]


def load_code(
    name: str,
    table: Mapping[str, str],
    files: Mapping[str, str],
    *,
    kind: str,
    signature: Signature,
) -> Any:
    """Return the object that a name leads to, imported once in a process.

    Args:
        table: registered name → `module:Name`.
        files: `runner.code_files`. A relative path in `name` that is no file of the working folder
            is the one of them whose path ends so; every other file is read from the disk.
        kind: a noun for messages, such as "environment".
        signature: see the module's docstring; objects that `table` names are not checked.

    Raises:
        CodeError: there is no such object, or it has another signature.
    """
    place, attribute = _place_of(name, table, kind, signature)
    if place.endswith(".pkl"):
        loaded = unpickled(name, place, files)
    else:
        try:
            with import_lock:
                module = (
                    module_of_file(place, files)
                    if place.endswith(".py")
                    else importlib.import_module(place)
                )
        except (Exception, SystemExit) as error:  # whatever a module does as it is imported
            raise _not_imported(name, place, error, is_ours=name in table) from error
        if not hasattr(module, attribute):
            # offer the module's own functions and classes, not those that it imports
            defined = {
                key: value
                for key, value in vars(module).items()
                if getattr(value, "__module__", None) == module.__name__
            }
            candidates = [
                key
                for key, value in defined.items()
                if isinstance(value, type) or _noun(signature) != "class"
            ]
            raise _absent(name, place, attribute, candidates, signature)
        loaded = getattr(module, attribute)
    if name not in table and (problem := _mismatch(loaded, attribute, kind, signature)):
        raise CodeError(f"{name!r}: {problem}")
    return loaded


def check_code(
    name: str,
    table: Mapping[str, str],
    files: Mapping[str, str],
    *,
    kind: str,
    signature: Signature,
) -> None:
    """Refuse, without running any code, a name that `load_code` would refuse for its file or its
    signature.

    So code that imports torch is refused at once, too.

    Raises:
        CodeError: as `load_code`.
    """
    place, attribute = _place_of(name, table, kind, signature)
    if name in table or place.endswith(".pkl"):
        return
    try:
        tree = ast.parse(source_of(place, files), place)
    except (OSError, SyntaxError, ValueError, ImportError) as error:
        raise _not_imported(name, place, error) from error
    defined = {
        n.name: n
        for n in tree.body
        if isinstance(n, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef)
    }
    assigned_names = {
        n.id for n in ast.walk(tree) if isinstance(n, ast.Name) and isinstance(n.ctx, ast.Store)
    }
    assigned_names |= {
        alias.asname or alias.name.partition(".")[0] for n in imports_of(tree) for alias in n.names
    }
    constants = [
        n for n in tree.body if isinstance(n, ast.Assign) and isinstance(n.value, ast.Constant)
    ]
    # A constant is no code.
    assigned_names -= {
        name.id for n in constants for name in n.targets if isinstance(name, ast.Name)
    }
    if attribute not in defined:
        # Names that only running the module would tell (assignments, star imports, __getattr__)
        # pass.
        if (
            attribute not in assigned_names
            and not assigned_names & {"*", "__getattr__"}
            and "__getattr__" not in defined
            and tree.body
        ):
            candidates = [
                n
                for n, v in defined.items()
                if isinstance(v, ast.ClassDef) or _noun(signature) != "class"
            ]
            raise _absent(name, place, attribute, candidates, signature)
        return
    stub = _stub(defined[attribute])
    if stub is not None and (problem := _mismatch(stub, attribute, kind, signature)):
        raise CodeError(f"{name!r}: {problem}")


def is_code(name: str) -> bool:
    """Return whether a name is written as `module:Name` or `path/to/file.py:Name`."""
    return ":" in name


def _place_of(
    name: str, table: Mapping[str, str], kind: str, signature: Signature
) -> tuple[str, str]:
    """Return the module or file of a name, and the attribute in it."""
    place, _, attribute = table.get(name, name).rpartition(":")
    if not place or not attribute:
        registered = f"there are {', '.join(sorted(table))}; " if table else ""
        raise CodeError(
            f"no {kind} {name!r}; {registered}write module:Name or path/to/file.py:Name for "
            f"another ({_requirement(kind, signature)});"
            f"{nearest(name, table)}".rstrip(";")
        )
    return place, attribute


def _noun(signature: Signature) -> str:
    """Return the noun for objects of a signature."""
    if not isinstance(signature, str):
        return "class"
    return "function" if "(" in signature else "object"


def _requirement(kind: str, signature: Signature) -> str:
    """Return a clause for messages: the signature that this kind of object must have."""
    if not isinstance(signature, str):
        return f"{_with_article(kind)} has {', '.join(signature)}"
    return (
        f"{_with_article(kind)} is called as {signature}"
        if "(" in signature
        else f"{_with_article(kind)} is {_with_article(signature)}"
    )


def _with_article(noun: str) -> str:
    return f"{'an' if noun[0] in 'aeiou' else 'a'} {noun}"


def _absent(
    name: str, place: str, attribute: str, candidates: Sequence[str], signature: Signature
) -> CodeError:
    """Return the error for a module that lacks the attribute; it lists the candidates."""
    noun = _noun(signature)
    plural = "classes" if noun == "class" else f"{noun}s"
    near = nearest(attribute, candidates)
    return CodeError(
        f"{name!r}: no {noun} {attribute!r} in {place}; its {plural} are {', '.join(candidates) or 'none'};{near}".rstrip(
            ";"
        )
    )


def _mismatch(candidate: Any, attribute: str, kind: str, signature: Signature) -> str | None:
    """Return the reason why an object doesn't have the required signature; None if it has."""
    if not isinstance(signature, str):
        if not isinstance(candidate, type):
            return f"{attribute} is no class; {_requirement(kind, signature)}"
        methods = {call: getattr(candidate, call.partition("(")[0], None) for call in signature}
        if missing_calls := [call for call, method in methods.items() if not callable(method)]:
            return f"{attribute} has no {' and no '.join(missing_calls)}; {_requirement(kind, signature)}"
        for call, method in methods.items():
            # a class's plain method takes `self` before the arguments of the call
            is_static = isinstance(
                inspect.getattr_static(candidate, call.partition("(")[0], None),
                staticmethod | classmethod,
            )
            if not _accepts(method, call if is_static else call.replace("(", "(self, ", 1)):
                return f"{attribute}.{_written(method, call)} can't be called as {call}; {_requirement(kind, signature)}"
        return None
    if "(" not in signature:
        names = {cls.__name__ for cls in type(candidate).__mro__}
        return (
            None
            if signature in names
            else f"{attribute} is {_with_article(type(candidate).__name__)}; {_requirement(kind, signature)}"
        )
    if not callable(candidate):
        return f"{attribute} is no function; {_requirement(kind, signature)}"
    if not any(_accepts(candidate, call) for call in signature.split(" or ")):
        return f"{_written(candidate, attribute)} doesn't take these arguments; {_requirement(kind, signature)}"
    return None


def _written(function: Any, name: str) -> str:
    """Return a function's name with its parameters; the name alone where they are unknown."""
    try:
        return f"{name.partition('(')[0]}{inspect.signature(function)}"
    except (TypeError, ValueError):
        return name


def _accepts(function: Any, call: str) -> bool:
    """Return whether a function can be called as `call` is written.

    Where `call` ends in `**`, the function may leave out its arguments, and require further ones by
    name.
    """
    namespace: dict[str, Any] = {}
    # Python parses the call: as a definition, its parameters are those to pass.
    exec(f"def {call}: pass", namespace)
    call_parameters = inspect.signature(namespace[call.partition("(")[0]]).parameters.values()
    try:
        signature = inspect.signature(function)
    except (TypeError, ValueError):  # functions written in C may have none
        return True
    positional = [p.name for p in call_parameters if p.kind is p.POSITIONAL_OR_KEYWORD]
    keywords = {p.name: None for p in call_parameters if p.kind is p.KEYWORD_ONLY}
    offers_any = any(p.kind is p.VAR_KEYWORD for p in call_parameters)
    bind = signature.bind_partial if offers_any else signature.bind
    try:
        bind(*positional, **keywords)
    except TypeError:
        return False
    return True


def _stub(node: Any) -> Any:
    """Return an empty function or class with the parameters of this definition.

    None where only running the definition would tell them: decorators, base classes, metaclasses.
    """
    if node.decorator_list:
        return None
    if isinstance(node, ast.ClassDef):
        if any(getattr(base, "id", None) != "object" for base in node.bases) or node.keywords:
            return None
        members = [
            _stub(n) for n in node.body if isinstance(n, ast.FunctionDef | ast.AsyncFunctionDef)
        ]
        assigned_names = {
            n.id for n in ast.walk(node) if isinstance(n, ast.Name) and isinstance(n.ctx, ast.Store)
        }
        if None in members or assigned_names:  # a method may be assigned
            return None
        return type(node.name, (), {member.__name__: member for member in members})
    # Annotations and defaults are expressions of the user's, which must not run.
    arguments = ast.parse(f"def f({ast.unparse(node.args)}): pass").body[0].args  # type: ignore[attr-defined]
    for argument in [
        *arguments.posonlyargs,
        *arguments.args,
        *arguments.kwonlyargs,
        arguments.vararg,
        arguments.kwarg,
    ]:
        if argument is not None:
            argument.annotation = None
    arguments.defaults = [ast.Constant(None) for _ in arguments.defaults]
    arguments.kw_defaults = [default and ast.Constant(None) for default in arguments.kw_defaults]
    namespace: dict[str, Any] = {}
    exec(f"def {node.name}({ast.unparse(arguments)}): pass", namespace)
    return namespace[node.name]


def _not_imported(name: str, place: str, error: BaseException, is_ours: bool = False) -> CodeError:
    """Return the error for a module or file that can't be imported, with a hint."""
    if isinstance(error, CodeError):
        return CodeError(f"{name!r}: {error}")
    # the named file is missing, and not one that it opens
    if (
        isinstance(error, OSError)
        and error.filename
        and os.path.basename(place) == os.path.basename(error.filename)
    ):
        return CodeError(
            f"{name!r}: no file {error.filename!r} ({error.strerror}); give the path of a Python "
            "file"
        )
    position = f", line {error.lineno}" if isinstance(error, SyntaxError) else ""
    install = pip_install("rlinf_vl[envs]") if is_ours else "install it where workers run"
    hint = f"; {install}" if isinstance(error, ModuleNotFoundError) else ""
    return CodeError(
        f"{name!r}: {place}{position} can't be imported: {type(error).__name__}: {error}{hint}"
    )
