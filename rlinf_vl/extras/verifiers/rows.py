"""Environments of the package `verifiers`, and their data sets as rows.

An environment is a Python package or module with `load_environment`, which the package finds by
name. Its data set becomes rows that hold the question as text, the answer, and their number: the
environment is played with its own row of that number, images included.
"""

import hashlib
import importlib.util
import json
import signal
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from functools import lru_cache
from importlib.metadata import PackageNotFoundError, version
from typing import TYPE_CHECKING, Any

from rlinf_vl.config.hubs import parse_rows_path
from rlinf_vl.errors import pip_install

if TYPE_CHECKING:
    import datasets

#: The first version without `load_environment`, whose tasks and harnesses are another interface.
_TOO_NEW = (0, 4)
_INSTALL = pip_install("rlinf_vl[verifiers]")
_lock = threading.Lock()


def environment_missing(name: str) -> str | None:
    """Return why an environment can't be loaded, and what to install; None if it is there.

    Nothing is imported: that takes seconds.
    """
    try:
        installed = version("verifiers")
    except PackageNotFoundError:
        return f"verifiers is not installed; {_INSTALL}"
    if tuple(int(number) for number in installed.split(".")[:2]) >= _TOO_NEW:
        return (
            f"verifiers {installed} has no load_environment, which was removed in 0.4; {_INSTALL}"
        )
    with suppress(ValueError):  # a module that code has made has no spec
        if importlib.util.find_spec(_module(name)) is None:
            return (
                f"no module {_module(name)!r}; install the environment "
                f"(prime env install {name}), where workers run, too"
            )
    return None


def load_environment(path: str) -> Any:
    """Return the environment of `verifiers://NAME?ARGUMENTS`, made once in a process.

    Raises:
        ValueError: it can't be made.
    """
    # Held by those who wait, too: making it twice would download and build everything twice.
    with _lock:
        return _load(path)


def environment_row(source: str, subset: str, number: int, digest: str) -> dict[str, Any]:
    """Return a row of an environment's own data set, as its rollouts take it.

    The arguments are a row's column `verifiers`.

    Raises:
        ValueError: the environment has another question at this place, or can't be made.
    """
    row = dict(_subset(load_environment(source), subset)[number])
    # An environment that draws its rows anew in each process would be paid for other questions.
    if _digest(row) != digest:
        raise ValueError(
            f"row {number} of {source} is another question in this process; give the environment "
            "a seed in rollout.env_kwargs"
        )
    return row


def _question_of(row: dict[str, Any]) -> str:
    """Return the text of a row's prompt; images are left out."""
    prompt = row["prompt"]
    if isinstance(prompt, str):
        return prompt
    texts = []
    for message in prompt:
        content = message.get("content") or ""
        parts = [{"text": content}] if isinstance(content, str) else content
        texts += [part["text"] for part in parts if part.get("text")]
    return "\n\n".join(texts)


def verifiers_rows(path: str, split: str) -> "datasets.Dataset":
    """Return the rows of `verifiers://NAME?ARGUMENTS`.

    Args:
        split: "train", or "val" for the environment's evaluation set. An environment without one
            is validated on what it trains on, as in its own package.

    Raises:
        ValueError: the environment can't be made, or can't be played trajectory by trajectory.
    """
    import datasets

    environment = load_environment(path)
    subset = "eval" if split == "val" else "train"
    columns: dict[str, list[Any]] = {"id": [], "problem": [], "answer": [], "verifiers": []}
    rows: Any = _subset(environment, subset)
    for number, row in enumerate(rows):
        answer = row.get("answer")
        columns["id"].append(str(number))
        columns["problem"].append(_question_of(row))
        # Only to be looked at: the rubric reads the environment's own row.
        columns["answer"].append("" if answer is None else _as_text(answer))
        columns["verifiers"].append(
            {"source": path, "subset": subset, "number": number, "digest": _digest(row)}
        )
    return datasets.Dataset.from_dict(columns)


def _digest(row: dict[str, Any]) -> str:
    text = f"{_question_of(row)}\0{_as_text(row.get('answer'))}"
    return hashlib.blake2b(text.encode(), digest_size=8).hexdigest()


def _as_text(answer: Any) -> str:
    return answer if isinstance(answer, str) else json.dumps(answer, default=str)


def _subset(environment: Any, subset: str) -> "datasets.Dataset":
    return environment.get_eval_dataset() if subset == "eval" else environment.get_dataset()


def _module(name: str) -> str:
    """Return the module of an environment, by the rule of `verifiers`."""
    return name.rpartition("/")[2].replace("-", "_")


@lru_cache
def _load(path: str) -> Any:
    name, arguments = parse_rows_path(path)
    if reason := environment_missing(name):
        raise ValueError(f"verifiers:{name}: {reason}")

    def load() -> Any:
        import verifiers  # pyright: ignore[reportMissingImports]

        return verifiers.load_environment(name, **arguments)  # pyright: ignore[reportAttributeAccessIssue]

    try:
        # Always in a thread, so that it is the same whoever asks first.
        with _without_handlers(), ThreadPoolExecutor(1) as pool:
            environment = pool.submit(load).result()
    except Exception as error:  # an environment may raise anything
        reason = str(error)
        # The package hides a failed import behind the advice to install an extra.
        if isinstance(error.__cause__, ImportError):
            reason += f" ({error.__cause__})"
        raise ValueError(f"verifiers:{name} can't be made: {reason}") from error
    if environment.requires_group_rollouts:
        raise ValueError(
            f"verifiers:{name} has reward functions of whole groups, which need all its answers at "
            "once; only those of single rollouts are supported"
        )
    return environment


@contextmanager
def _without_handlers() -> Iterator[None]:
    """Let threads ask for signal handlers, without effect, while an environment is made.

    Each environment replaces the handler of SIGINT. That fails in a thread, and in the main thread
    Ctrl-C would no longer end the run in order.
    """
    set_handler = signal.signal

    def keep(number: int, handler: Any) -> Any:
        if threading.current_thread() is threading.main_thread():
            return set_handler(number, handler)
        return signal.getsignal(number)

    signal.signal = keep  # type: ignore[assignment]
    try:
        yield
    finally:
        signal.signal = set_handler  # type: ignore[assignment]
