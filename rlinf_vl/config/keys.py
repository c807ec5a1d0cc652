"""Every key of the schema by its dotted name: type, default, documentation, allowed values; and what to say of an unknown one."""

import ast
import dataclasses
import difflib
import inspect
from collections.abc import Iterable, Iterator, Sequence
from functools import cache
from itertools import pairwise
from typing import Any, NamedTuple, get_type_hints

import rlinf_vl.config.schema as schema
from rlinf_vl.config.schema import Limit


class Key(NamedTuple):
    """Annotation, default (`omegaconf.MISSING`: must be given), the text under the field, and what a value must be."""

    type: Any
    default: Any
    doc: str
    allowed: Limit | tuple[str, ...] | None


@cache
def config_keys() -> dict[str, Key]:
    """Every leaf of the schema, by its dotted name and in the schema's order."""
    return dict(_walk(schema.Config(), "", _field_docs()))


@cache
def config_sections() -> dict[str, tuple[str, ...]]:
    """Dotted names of the sections (`runner`, `actor.optim`, …), each with its leaves' dotted names."""
    sections: dict[str, list[str]] = {}
    for key in config_keys():
        parts = key.split(".")
        for depth in range(1, len(parts)):
            sections.setdefault(".".join(parts[:depth]), []).append(key)
    return {section: tuple(keys) for section, keys in sections.items()}


def suggestion(key: str, limit: int = 2) -> str:
    """ " did you mean 'runner.seed'?" for a dotted name that isn't a key; the keys there are, if nothing is near.

    The same leaf in other sections comes first, then names that look alike, then leaves that do.
    """
    known = config_keys()
    section, _, leaf = key.rpartition(".")
    matches = sorted((k for k in known if _leaf(k) == leaf), key=lambda k: -_likeness(k, key))
    alike = difflib.get_close_matches(key, known, n=limit, cutoff=0.7)
    matches += [k for k in alike if _likeness(_leaf(k), leaf) > 0.5]
    matches = matches or [k for k in known if _likeness(_leaf(k), leaf) > 0.7]
    if section in known and not matches:  # a name below a leaf
        matches = [section]
    if matches:
        return did_you_mean(dict.fromkeys(matches), limit)
    if section in config_sections():
        names = (k.removeprefix(f"{section}.") for k in config_sections()[section])
        return f" the keys of '{section}' are {', '.join(names)}"
    return f" the sections are {', '.join(name for name in config_sections() if '.' not in name)}"


def did_you_mean(names: Iterable[str], limit: int = 2) -> str:
    """ " did you mean 'a' or 'b'?" of the first so many names; "" if there are none."""
    quoted = [repr(name) for name in names][:limit]
    return f" did you mean {' or '.join(quoted)}?" if quoted else ""


def nearest(name: str, known: Sequence[str]) -> str:
    """`did_you_mean` of the one known name that looks most like this one."""
    return did_you_mean(difflib.get_close_matches(name, known, n=1))


def _leaf(key: str) -> str:
    return key.rpartition(".")[2]


def _likeness(a: str, b: str) -> float:
    return difflib.SequenceMatcher(None, a, b).ratio()


def _walk(section: Any, prefix: str, docs: dict[tuple[str, str], str]) -> Iterator[tuple[str, Key]]:
    hints = get_type_hints(type(section))
    for field in dataclasses.fields(section):
        value = getattr(section, field.name)
        if dataclasses.is_dataclass(value):
            yield from _walk(value, f"{prefix}{field.name}.", docs)
        else:
            doc = docs.get((type(section).__name__, field.name), "")
            yield prefix + field.name, Key(hints[field.name], value, doc, field.metadata.get("allowed"))


def _field_docs() -> dict[tuple[str, str], str]:
    """(class, field) → the string literal under the field, on one line; Python drops it at run time."""
    docs = {}
    for section in ast.parse(inspect.getsource(schema)).body:
        if isinstance(section, ast.ClassDef):
            for statement, below in pairwise(section.body):
                match statement, below:
                    case ast.AnnAssign(target=ast.Name(id=name)), ast.Expr(value=ast.Constant(value=str(doc))):
                        docs[section.name, name] = " ".join(doc.split())
    return docs
