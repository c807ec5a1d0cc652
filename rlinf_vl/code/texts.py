"""Files and objects of users as texts that travel with a config: gathered, and made into modules and objects again.

A file goes with those beside it that it imports. An object of a notebook goes as base64 of its cloudpickle, under a path that ends
in `.pkl`.
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

_ENCODED = "base64:"
import_lock = RLock()


class CodeError(ValueError):
    """A name that leads to no code of the kind that is wanted. Its cause is what the code raised as it was imported."""


def collect_code(name: str, folders: Sequence[str], files: dict[str, str]) -> str:
    """Add the text of the file that `name` is about to `files`, with those beside it that it imports.

    Returns `name` with an absolute path. A file that isn't there is left to `load_code` to refuse.

    Args:
        folders: where a relative path is looked for, the first first.
    """
    place, _, attribute = name.rpartition(":")
    path = os.path.expanduser(place)
    if place.endswith(".pkl") or not place:
        return name
    if not place.endswith(".py"):  # a module of the working folder is a file like any other
        path = f"{place}.py"
        if "." in place or not os.path.isfile(os.path.join(folders[0], path)):
            return name
    if (known := _among(path, files)) is not None:
        return f"{known}:{attribute}"
    there = (os.path.join(folder, path) for folder in folders)
    path = os.path.abspath(next((p for p in there if os.path.isfile(p)), os.path.join(folders[0], path)))
    if os.path.isfile(path):
        _collect(path, files)
    return f"{path}:{attribute}"


def pickled(found: Any) -> tuple[str, str, str]:
    """An object of a notebook or script as (name for a config, path in `runner.code_files`, text there). What it uses of modules
    that aren't installed goes with it.

    Raises:
        CodeError: it holds something that can't be pickled.
    """
    import cloudpickle

    own = [m for m in list(sys.modules.values()) if _is_users(m)]
    for module in own:
        cloudpickle.register_pickle_by_value(module)
    name = "".join(c if c.isalnum() else "_" for c in getattr(found, "__name__", type(found).__name__)).strip("_")
    try:
        text = base64.b64encode(cloudpickle.dumps(found)).decode()
    except Exception as error:  # whatever a __reduce__ does
        raise CodeError(
            f"{name}: can't travel to the workers: {type(error).__name__}: {error}; make what it needs within it, or put it into a "
            "file and give 'path/to/file.py:Name'"
        ) from error
    finally:
        for module in own:
            cloudpickle.unregister_pickle_by_value(module)
    return f"{name}.pkl:{name}", f"{name}.pkl", text


def _among(path: str, files: Mapping[str, str]) -> str | None:
    """Which of the files a path means."""
    path = os.path.expanduser(path)
    ends = f"/{os.path.normpath(path)}"
    return next((k for k in files if os.path.realpath(k) == os.path.realpath(path) or k.endswith(ends)), None)


def source_of(place: str, files: Mapping[str, str]) -> str:
    """The text of a file, or of a module; "" of one that has none."""
    if place.endswith(".py"):
        known = _among(place, files)
        return _read(os.path.abspath(os.path.expanduser(place))) if known is None else _plain(files[known])
    try:
        spec = importlib.util.find_spec(place)
    except ValueError:  # a module that was made, not found
        return ""
    except Exception as error:  # whatever a parent package does as it is imported
        raise ImportError(f"{type(error).__name__}: {error}") from error
    if spec is None:
        raise ModuleNotFoundError(f"No module named {place!r}")
    return _read(spec.origin) if spec.origin and spec.origin.endswith(".py") else ""


def _storable(text: str) -> str:
    """A text for `runner.code_files`, in which `${` would refer to another key."""
    return _ENCODED + base64.b64encode(text.encode()).decode() if "${" in text else text


def _plain(stored: str) -> str:
    return base64.b64decode(stored.removeprefix(_ENCODED)).decode() if stored.startswith(_ENCODED) else stored


def _read(path: str) -> str:
    return Path(path).read_text(encoding="utf-8", errors="replace")


def unpickled(name: str, place: str, files: Mapping[str, str]) -> Any:
    if (text := files.get(place)) is None:
        raise CodeError(f"{name!r}: no {place!r} in runner.code_files; go on from the config.yaml of its run's folder")
    with import_lock:
        if text not in _objects:
            import cloudpickle

            try:
                _objects[text] = cloudpickle.loads(base64.b64decode(text))
            except Exception as error:  # another Python, or a module that is lacking
                raise CodeError(
                    f"{name!r}: can't be read from runner.code_files: {type(error).__name__}: {error}"
                ) from error
        return _objects[text]


_objects: dict[str, Any] = {}


class _Text(ExecutionLoader):
    """Makes a module of a text."""

    def __init__(self, path: str, text: str) -> None:
        self.path, self.text = path, text

    def get_source(self, fullname: str) -> str:
        return self.text

    def get_filename(self, fullname: str) -> str:
        return self.path

    def is_package(self, fullname: str) -> bool:
        return os.path.basename(self.path) == "__init__.py"

    def exec_module(self, module: ModuleType) -> None:
        lines = self.text.splitlines(keepends=True)
        linecache.cache[self.path] = (len(self.text), None, lines, self.path)  # for tracebacks, wherever they are made
        super().exec_module(module)


class _Beside(MetaPathFinder):
    """Finds modules among the texts that stand beside a file that was loaded."""

    def __init__(self) -> None:
        self._loaders: dict[str, _Text] = {}

    def add(self, path: str, files: Mapping[str, str]) -> None:
        """Whatever is in the folder of this file; a module that is there with another text is imported anew."""
        root = f"{os.path.dirname(path)}/"
        for other, text in files.items():
            if other == path or not other.startswith(root) or not other.endswith(".py"):
                continue
            name = other.removeprefix(root).removesuffix(".py").removesuffix("/__init__").replace("/", ".")
            known = self._loaders.get(name)
            if known is None or (known.path, known.text) != (other, _plain(text)):
                self._loaders[name] = _Text(other, _plain(text))
                sys.modules.pop(name, None)

    def find_spec(self, fullname: str, path: Any = None, target: Any = None) -> ModuleSpec | None:
        loader = self._loaders.get(fullname)
        return loader and importlib.util.spec_from_loader(fullname, loader)


_beside = _Beside()


def module_of_file(path: str, files: Mapping[str, str]) -> ModuleType:
    """The module that a file's text makes, executed once in a process."""
    full = _among(path, files)
    if full is None:
        full, files = os.path.abspath(os.path.expanduser(path)), {}
        _collect(full, files)
    told = "\0".join((full, *(f"{k}:{v}" for k, v in sorted(files.items()) if k.startswith(os.path.dirname(full)))))
    name = f"rlinf_vl_code_{hashlib.sha256(told.encode(errors='replace')).hexdigest()[:16]}"
    if name not in sys.modules:
        if _beside not in sys.meta_path:
            sys.meta_path.insert(0, _beside)
        _beside.add(full, files)
        loader = _Text(full, _plain(files[full]))
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
    """Add a file, and those beside it that it imports, and so on."""
    root, ahead = os.path.dirname(path), [path]
    while ahead:
        file = ahead.pop()
        if file in files and file != path:
            continue
        files[file] = _storable(text := _read(file))
        with suppress(SyntaxError, ValueError):  # told of when it is loaded
            package = os.path.relpath(os.path.dirname(file), root).split(os.sep) if file != path else []
            for module in _modules(ast.parse(text), [part for part in package if part != "."]):
                if _is_installed(module.partition(".")[0], root):
                    continue
                base = os.path.join(root, *module.split("."))
                ahead += [p for p in (f"{base}.py", f"{base}/__init__.py") if os.path.isfile(p)]


def imports_of(tree: ast.AST) -> Iterator[ast.Import | ast.ImportFrom]:
    return (node for node in ast.walk(tree) if isinstance(node, ast.Import | ast.ImportFrom))


def _modules(tree: ast.AST, package: list[str]) -> Iterator[str]:
    """Dotted names that may be modules which a file imports, packages above them included."""
    for node in imports_of(tree):
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        else:
            above = package[: len(package) - node.level + 1] if node.level else []
            base = ".".join([*above, *([node.module] if node.module else [])])
            names = [base, *(f"{base}.{alias.name}".lstrip(".") for alias in node.names)]
        for name in filter(None, names):
            parts = name.split(".")
            yield from (".".join(parts[: i + 1]) for i in range(len(parts)))


def _is_installed(module: str, root: str) -> bool:
    """Whether a top-level module comes from elsewhere than this folder."""
    if module in sys.stdlib_module_names or module == "rlinf_vl":
        return True
    try:
        spec = importlib.util.find_spec(module)
    except ValueError:
        return True
    if spec is None or isinstance(spec.loader, _Text):
        return False
    places = [spec.origin, *(spec.submodule_search_locations or ())]
    return not any(place and os.path.realpath(place).startswith(os.path.realpath(root) + os.sep) for place in places)


def _is_users(module: ModuleType) -> bool:
    """Whether a module is a user's file, which workers may lack: neither installed, nor of Python, nor ours."""
    path = os.path.realpath(getattr(module, "__file__", None) or "/")
    installed = (sys.prefix, sys.base_prefix, os.path.dirname(os.__file__), os.path.dirname(__file__))
    inside = any(path.startswith(os.path.realpath(folder) + os.sep) for folder in installed) or "site-packages" in path
    return path.endswith(".py") and not inside and module.__name__ != "__main__"
