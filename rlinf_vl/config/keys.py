"""Every key of the schema by its dotted name: type, default, documentation, allowed values; and what to say of an unknown one."""

import ast
import dataclasses
import difflib
import inspect
from collections.abc import Iterator
from functools import cache
from itertools import accumulate, chain, pairwise
from typing import Any, NamedTuple, get_type_hints

from omegaconf import DictConfig, OmegaConf

from rlinf_vl.config.aliases import hint
from rlinf_vl.config.schema import Config, Limit
from rlinf_vl.errors import did_you_mean


class Key(NamedTuple):
    """Annotation, default (`omegaconf.MISSING`: must be given), the text under the field, and what a value must be."""

    type: Any
    default: Any
    doc: str
    allowed: Limit | tuple[str, ...] | None


@cache
def config_keys() -> dict[str, Key]:
    """Every leaf of the schema, by its dotted name and in the schema's order."""
    return dict(_walk(Config(), ""))


def set_key(typed: DictConfig, key: str, value: Any) -> None:
    """Set a key of a structured `Config`. Raises OmegaConfBaseException: the value is of another type."""
    if type(value) is int and config_keys()[key].type == float | str:  # OmegaConf converts no unions
        value = float(value)
    OmegaConf.update(typed, key, value, merge=False)


@cache
def config_sections() -> dict[str, tuple[str, ...]]:
    """Dotted names of the sections (`runner`, `actor.optim`, …), each with its leaves' dotted names."""
    parents = (accumulate(key.split(".")[:-1], "{}.{}".format) for key in config_keys())
    sections = dict.fromkeys(chain.from_iterable(parents))
    return {section: tuple(key for key in config_keys() if key.startswith(f"{section}.")) for section in sections}


def suggestion(key: str) -> str:
    """ " did you mean 'runner.seed'?" for a dotted name that isn't a key; the keys there are, if nothing is near.

    What another system calls so comes first, then the same leaf in other sections, what others call nearly so, names that look
    alike, leaves that do.
    """
    if theirs := hint(key):
        return theirs
    known, sections = config_keys(), config_sections()
    section, _, leaf = key.rpartition(".")
    alike = {k: (_likeness(k.rpartition(".")[2], leaf), _likeness(k, key)) for k in known}
    matches = [k for k, (leaves, _) in alike.items() if leaves == 1]
    if not matches and (theirs := hint(key, nested=True)):
        return theirs
    matches = matches or [k for k, (leaves, names) in alike.items() if leaves > 0.5 and names > 0.7]
    matches = matches or [k for k, (leaves, _) in alike.items() if leaves > 0.7]
    matches = matches or [k for k in known if k == section]  # a name below a leaf
    if matches:
        return did_you_mean(sorted(matches, key=lambda k: alike[k], reverse=True)[:2])
    if section in sections:
        return f" the keys of '{section}' are {', '.join(k.removeprefix(f'{section}.') for k in sections[section])}"
    return f" the sections are {', '.join(name for name in sections if '.' not in name)}"


def _likeness(a: str, b: str) -> float:
    return difflib.SequenceMatcher(None, a, b).ratio()


def _walk(section: Any, prefix: str) -> Iterator[tuple[str, Key]]:
    hints, docs = get_type_hints(type(section)), _field_docs(type(section))
    for field in dataclasses.fields(section):
        value = getattr(section, field.name)
        if dataclasses.is_dataclass(value):
            yield from _walk(value, f"{prefix}{field.name}.")
        else:
            doc = docs.get(field.name, "")
            yield prefix + field.name, Key(hints[field.name], value, doc, field.metadata.get("allowed"))


def _field_docs(section: type) -> dict[str, str]:
    """Field → the string literal under it, on one line; Python drops it at run time."""
    docs = {}
    (parsed,) = ast.parse(inspect.getsource(section)).body
    assert isinstance(parsed, ast.ClassDef)
    for statement, below in pairwise(parsed.body):
        match statement, below:
            case ast.AnnAssign(target=ast.Name(id=name)), ast.Expr(value=ast.Constant(value=str(doc))):
                docs[name] = " ".join(doc.split())
    return docs
