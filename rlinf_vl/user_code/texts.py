"""Files and objects of users as texts that travel with a config: collected, and made into modules
and objects again.

A file travels with those beside it that it imports. An object of a notebook travels as base64 of
its cloudpickle, under a path that ends in `.pkl`.

Not Ray's `py_modules`: Ray 2.60 uploads folders for a whole job only, so a notebook's second run
could bring no other code; processes without Ray (rewards, checks) and resumed runs need it, too.
"""

import ast
import base64
import hashlib
import importlib.util
import linecache
import os
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from importlib.abc import ExecutionLoader, MetaPathFinder
from importlib.machinery import ModuleSpec
from pathlib import Path
from threading import RLock
from types import ModuleType
from typing import Any

#: Prefix of a text that is stored as base64.
_ENCODED = "base64:"
#: Held while user code is imported or unpickled, so that two threads don't execute a module twice.
import_lock = RLock()


class CodeError(ValueError):
    """A name that leads to no code of the required kind. Its cause is the error that the code
    raised on import."""


def collect_code(name: str, folders: Sequence[str], files: dict[str, str]) -> str:
    """Add the text of the file that `name` leads to, and of those beside it that it imports, to
    `files`.

    Returns `name` with an absolute path. A missing file, and a name that may mean several, are left
    to `load_code` to refuse.

    Args:
        folders: the folders in which a relative path is looked up, in this order.
    """
    place, _, attribute = name.rpartition(":")
    path = os.path.expanduser(place)
    if place.endswith(".pkl") or not place:
        return name
    if not place.endswith(".py"):  # a module of the working folder is a file like any other
        path = f"{place}.py"
        if "." in place or not os.path.isfile(os.path.join(folders[0], path)):
            return name
    try:
        path = located(path, folders, files)
    except CodeError:  # `check_code` reports it
        return name
    if path not in files and os.path.isfile(path):
        _collect(path, files)
    return f"{path}:{attribute}"


def pickled(value: Any) -> tuple[str, str, str]:
    """Return an object of a notebook or script as (name for a config, path in `runner.code_files`,
    text there).

    Modules that it uses and that aren't installed are pickled with it.

    Raises:
        CodeError: it holds something that can't be pickled.
    """
    import cloudpickle

    user_modules = [m for m in list(sys.modules.values()) if _is_users(m)]
    for module in user_modules:
        # by value, not by name: workers may lack the user's modules
        cloudpickle.register_pickle_by_value(module)
    name = "".join(
        c if c.isalnum() else "_" for c in getattr(value, "__name__", type(value).__name__)
    ).strip("_")
    try:
        text = base64.b64encode(cloudpickle.dumps(value)).decode()
    except Exception as error:  # a __reduce__ may raise anything
        raise CodeError(
            f"{name}: can't travel to the workers: {type(error).__name__}: {error}; make what it "
            "needs within it, or put it into a file and give 'path/to/file.py:Name'"
        ) from error
    finally:
        for module in user_modules:
            cloudpickle.unregister_pickle_by_value(module)
    return f"{name}.pkl:{name}", f"{name}.pkl", text


def located(path: str, folders: Sequence[str], files: Mapping[str, str]) -> str:
    """Return the absolute path that a path means: one of `files`, or of the disk.

    The first folder decides that holds it, among `files` or on the disk. A path that is in no
    folder means the one file whose path ends so, as a run may go on in another folder.

    Raises:
        CodeError: the paths of several files end so.
    """
    candidates = [os.path.abspath(os.path.join(folder, path)) for folder in folders]
    for candidate in candidates:
        if candidate in files:
            return candidate
        real_path = os.path.realpath(candidate)
        for key in files:
            if os.path.realpath(key) == real_path:
                return key
        if os.path.isfile(candidate):
            return candidate
    ending = f"/{os.path.normpath(path)}"
    matches = [key for key in files if key.endswith(ending)]
    if len(matches) > 1:
        raise CodeError(f"{path!r} may be {' or '.join(matches)}; give the whole path")
    return matches[0] if matches else candidates[0]


def source_of(place: str, files: Mapping[str, str]) -> str:
    """Return the text of a file or a module; "" for a module without a Python file."""
    if place.endswith(".py"):
        path = located(os.path.expanduser(place), [os.getcwd()], files)
        return _decoded(files[path]) if path in files else _read(path)
    try:
        spec = importlib.util.find_spec(place)
    except ValueError:  # a module that code has made has no spec
        return ""
    except Exception as error:  # importing a parent package may raise anything
        raise ImportError(f"{type(error).__name__}: {error}") from error
    if spec is None:
        raise ModuleNotFoundError(f"No module named {place!r}")
    return _read(spec.origin) if spec.origin and spec.origin.endswith(".py") else ""


def _encoded(text: str) -> str:
    """Return a text for `runner.code_files`; base64 if it has `${`, which would refer to another
    key."""
    return _ENCODED + base64.b64encode(text.encode()).decode() if "${" in text else text


def _decoded(stored: str) -> str:
    return (
        base64.b64decode(stored.removeprefix(_ENCODED)).decode()
        if stored.startswith(_ENCODED)
        else stored
    )


def _read(path: str) -> str:
    return Path(path).read_text(encoding="utf-8", errors="replace")


def unpickled(name: str, place: str, files: Mapping[str, str]) -> Any:
    """Return the object that is stored at `place`, loaded once in a process."""
    if (text := files.get(place)) is None:
        raise CodeError(
            f"{name!r}: no {place!r} in runner.code_files; go on from the config.yaml of its run's "
            "folder"
        )
    with import_lock:
        if text not in _objects:
            import cloudpickle

            try:
                _objects[text] = cloudpickle.loads(base64.b64decode(text))
            except Exception as error:  # another Python version, or a missing module
                raise CodeError(
                    f"{name!r}: can't be read from runner.code_files: {type(error).__name__}: "
                    f"{error}"
                ) from error
        return _objects[text]


#: Text → the object it was loaded to.
_objects: dict[str, Any] = {}


class _TextLoader(ExecutionLoader):
    """A loader that makes a module of a text."""

    def __init__(self, path: str, text: str) -> None:
        self.path = path
        self.text = text

    def get_source(self, fullname: str) -> str:
        return self.text

    def get_filename(self, fullname: str) -> str:
        return self.path

    def is_package(self, fullname: str) -> bool:
        return os.path.basename(self.path) == "__init__.py"

    def exec_module(self, module: ModuleType) -> None:
        lines = self.text.splitlines(keepends=True)
        # For tracebacks, wherever they are made.
        linecache.cache[self.path] = (
            len(self.text),
            None,
            lines,
            self.path,
        )
        super().exec_module(module)


class _SiblingFinder(MetaPathFinder):
    """A finder of modules among the texts that lie beside a loaded file."""

    def __init__(self) -> None:
        self._loaders: dict[str, _TextLoader] = {}

    def add(self, path: str, files: Mapping[str, str]) -> None:
        """Add the files in the folder of this file and below it.

        A module of such a name with another text is dropped, so that it is imported again.

        Raises:
            CodeError: two files of one run have one module name, and a function imports such files
                as it runs: it would get those of the file that was loaded last.
        """
        root = f"{os.path.dirname(path)}/"
        for sibling, text in files.items():
            if sibling == path or not sibling.startswith(root) or not sibling.endswith(".py"):
                continue
            name = (
                sibling.removeprefix(root)
                .removesuffix(".py")
                .removesuffix("/__init__")
                .replace("/", ".")
            )
            loader = self._loaders.get(name)
            # two files of a run may have siblings of one name
            if loader is None or (loader.path, loader.text) != (sibling, _decoded(text)):
                if loader and loader.path != sibling and loader.path in files:
                    _refuse_late_imports(name, loader.path, sibling, files)
                self._loaders[name] = _TextLoader(sibling, _decoded(text))
                sys.modules.pop(name, None)

    def find_spec(self, fullname: str, path: Any = None, target: Any = None) -> ModuleSpec | None:
        loader = self._loaders.get(fullname)
        return loader and importlib.util.spec_from_loader(fullname, loader)


def _refuse_late_imports(
    name: str, first_path: str, second_path: str, files: Mapping[str, str]
) -> None:
    """Refuse two files of one module name where a function imports one of the user's modules."""
    if files[first_path] == files[second_path]:
        return
    module_names = {
        part.removesuffix(".py") for path in files for part in path.split("/") if path != part
    }
    for path, text in files.items():
        if path.endswith(".py") and (shared_names := _late_imports(_decoded(text)) & module_names):
            raise CodeError(
                f"two files are imported as {name!r}: {first_path} and {second_path}, and a "
                f"function of {path} imports {min(shared_names)!r} only when it runs, so it may get the "
                "wrong one; rename one of the two, or import at the top of the file"
            )


_sibling_finder = _SiblingFinder()


def module_of_file(path: str, files: Mapping[str, str]) -> ModuleType:
    """Return the module that a file's text makes, executed once in a process."""
    absolute_path = located(os.path.expanduser(path), [os.getcwd()], files)
    if absolute_path not in files:
        files = {}
        _collect(absolute_path, files)
    # The name depends on all texts that the file may import, so a changed file is another module.
    folder = os.path.dirname(absolute_path)
    siblings = (f"{path}:{text}" for path, text in sorted(files.items()) if path.startswith(folder))
    content = "\0".join((absolute_path, *siblings))
    name = f"rlinf_vl_code_{hashlib.sha256(content.encode(errors='replace')).hexdigest()[:16]}"
    if name not in sys.modules:
        if _sibling_finder not in sys.meta_path:
            sys.meta_path.insert(0, _sibling_finder)
        _sibling_finder.add(absolute_path, files)
        loader = _TextLoader(absolute_path, _decoded(files[absolute_path]))
        spec = importlib.util.spec_from_loader(name, loader)
        assert spec is not None
        module = importlib.util.module_from_spec(spec)
        sys.modules[name] = module  # dataclasses and annotations look there
        try:
            loader.exec_module(module)
        except BaseException:
            del sys.modules[name]
            raise
    return sys.modules[name]


def _collect(path: str, files: dict[str, str]) -> None:
    """Add a file, the files beside it that it imports, theirs, and so on."""
    root = os.path.dirname(path)
    pending_files = [path]
    while pending_files:
        file = pending_files.pop()
        if file in files and file != path:
            continue
        text = _read(file)
        files[file] = _encoded(text)
        with suppress(SyntaxError, ValueError):  # `load_code` reports it
            package = (
                os.path.relpath(os.path.dirname(file), root).split(os.sep) if file != path else []
            )
            for module in _modules(ast.parse(text), [part for part in package if part != "."]):
                if _is_installed(module.partition(".")[0], root):
                    continue
                base = os.path.join(root, *module.split("."))
                pending_files += [
                    p for p in (f"{base}.py", f"{base}/__init__.py") if os.path.isfile(p)
                ]


def imports_of(tree: ast.AST) -> Iterator[ast.Import | ast.ImportFrom]:
    """Return the import statements in a syntax tree."""
    return (node for node in ast.walk(tree) if isinstance(node, ast.Import | ast.ImportFrom))


def _modules(tree: ast.AST, package: list[str]) -> Iterator[str]:
    """Yield dotted names that may be modules which a file imports, packages above them included."""
    for node in imports_of(tree):
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        else:
            # one dot is the file's own package, each further dot the one above
            above = package[: len(package) - node.level + 1] if node.level else []
            base = ".".join([*above, *([node.module] if node.module else [])])
            names = [base, *(f"{base}.{alias.name}".lstrip(".") for alias in node.names)]
        for name in filter(None, names):
            parts = name.split(".")
            yield from (".".join(parts[: i + 1]) for i in range(len(parts)))


def _late_imports(text: str) -> set[str]:
    """Return the first parts of module names that functions of a file import as they run."""
    late_names: set[str] = set()
    with suppress(SyntaxError, ValueError):  # the import of the file reports it
        for node in ast.walk(ast.parse(text)):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                late_names |= {module.partition(".")[0] for module in _modules(node, [])}
    return late_names


def _is_installed(module: str, root: str) -> bool:
    """Return whether a top-level module comes from elsewhere than this folder."""
    if module in sys.stdlib_module_names or module == "rlinf_vl":
        return True
    try:
        spec = importlib.util.find_spec(module)
    except ValueError:
        return True
    # `_sibling_finder` may have loaded it before, from the texts of this very folder
    if spec is None or isinstance(spec.loader, _TextLoader):
        return False
    locations = [spec.origin, *(spec.submodule_search_locations or ())]
    return not any(
        location and os.path.realpath(location).startswith(os.path.realpath(root) + os.sep)
        for location in locations
    )


def _is_users(module: ModuleType) -> bool:
    """Return whether a module is a user's file, which workers may lack: neither installed, nor of
    Python, nor ours."""
    path = os.path.realpath(getattr(module, "__file__", None) or "/")
    installed = [
        sys.prefix,
        sys.base_prefix,
        os.path.dirname(os.__file__),
        str(Path(__file__).parents[1]),  # this package, which a checkout has outside of sys.prefix
    ]
    inside = (
        any(path.startswith(os.path.realpath(folder) + os.sep) for folder in installed)
        or "site-packages" in path
    )
    return path.endswith(".py") and not inside and module.__name__ != "__main__"
