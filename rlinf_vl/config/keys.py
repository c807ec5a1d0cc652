"""Every key of the schema by its dotted name: type, default, documentation, allowed values; and
suggestions for unknown keys."""

import ast
import dataclasses
import difflib
import inspect
from collections.abc import Iterator
from functools import cache
from itertools import accumulate, chain, pairwise
from typing import Any, NamedTuple, get_type_hints

from omegaconf import DictConfig, OmegaConf

from rlinf_vl.config.parts import load_part
from rlinf_vl.config.removed import REMOVED
from rlinf_vl.config.schema import Config, Limit
from rlinf_vl.errors import did_you_mean


class Key(NamedTuple):
    """A key: annotation, default (`omegaconf.MISSING`: required), the text under the field, and the
    allowed values."""

    type: Any
    default: Any
    doc: str
    allowed: Limit | tuple[str, ...] | None


@cache
def config_keys() -> dict[str, Key]:
    """Return every leaf of the schema, by its dotted name and in the schema's order."""
    return dict(_walk(Config(), ""))


def set_key(typed: DictConfig, key: str, value: Any) -> None:
    """Set a key of a structured `Config`. Raises OmegaConfBaseException if the value is of another
    type."""
    # OmegaConf converts no unions
    if type(value) is int and config_keys()[key].type == float | str:
        value = float(value)
    OmegaConf.update(typed, key, value, merge=False)


@cache
def config_sections() -> dict[str, tuple[str, ...]]:
    """Return the dotted names of the sections (`runner`, `actor.optim`, …), each with its leaves'
    dotted names."""
    parents = (accumulate(key.split(".")[:-1], "{}.{}".format) for key in config_keys())
    sections = dict.fromkeys(chain.from_iterable(parents))
    keys_of: dict[str, tuple[str, ...]] = {}
    for section in sections:
        keys_of[section] = tuple(key for key in config_keys() if key.startswith(f"{section}."))
    return keys_of


def suggestion(key: str) -> str:
    """Return a hint for a dotted name that isn't a key, such as " did you mean 'runner.seed'?".

    A removed key has a hint of its own. Candidates, in this order: a key of another system with
    this name, the same leaf in other sections, a key of another system with a similar name, similar
    names, similar leaves. Without a candidate the hint lists the keys of the section, or the
    sections.
    """
    if key in REMOVED:
        return f" it is no longer read: {REMOVED[key].hint}"
    # The tables of other systems take 40 ms to read, and only an unknown key needs them.
    hint = load_part("foreign-key")
    if foreign_hint := hint(key):
        return foreign_hint
    keys, sections = config_keys(), config_sections()
    section, _, leaf = key.rpartition(".")
    # (similarity of the leaves, similarity of the whole names)
    similarity = {k: (_similarity(k.rpartition(".")[2], leaf), _similarity(k, key)) for k in keys}
    # The right name in the wrong section is the likeliest mistake.
    matches = [k for k, (leaves, _) in similarity.items() if leaves == 1]
    if not matches and (foreign_hint := hint(key, nested=True)):
        return foreign_hint
    matches = matches or [
        k for k, (leaves, names) in similarity.items() if leaves > 0.5 and names > 0.7
    ]
    matches = matches or [k for k, (leaves, _) in similarity.items() if leaves > 0.7]
    matches = matches or [k for k in keys if k == section]  # a name below a leaf
    if matches:
        return did_you_mean(sorted(matches, key=lambda k: similarity[k], reverse=True)[:2])
    if section in sections:
        return (
            f" the keys of '{section}' are "
            f"{', '.join(k.removeprefix(f'{section}.') for k in sections[section])}"
        )
    return f" the sections are {', '.join(name for name in sections if '.' not in name)}"


def _similarity(a: str, b: str) -> float:
    return difflib.SequenceMatcher(None, a, b).ratio()


def _walk(section: Any, prefix: str) -> Iterator[tuple[str, Key]]:
    """Yield the leaves of a section, by dotted names."""
    hints, docs = get_type_hints(type(section)), _field_docs(type(section))
    for field in dataclasses.fields(section):
        value = getattr(section, field.name)
        if dataclasses.is_dataclass(value):
            yield from _walk(value, f"{prefix}{field.name}.")
        else:
            summaries = field.metadata.get("summaries", {})
            sentences = (f"{name}: {summary}." for name, summary in summaries.items())
            doc = " ".join((docs.get(field.name, ""), *sentences))
            yield (
                prefix + field.name,
                Key(hints[field.name], value, doc, field.metadata.get("allowed")),
            )


def _field_docs(section: type) -> dict[str, str]:
    """Return the string literal under each field, on one line. It is read from the source, as
    Python drops it."""
    docs = {}
    (parsed,) = ast.parse(inspect.getsource(section)).body
    assert isinstance(parsed, ast.ClassDef)
    for statement, below in pairwise(parsed.body):
        match statement, below:
            case ast.AnnAssign(target=ast.Name(id=name)), ast.Expr(
                value=ast.Constant(value=str(doc))
            ):
                docs[name] = " ".join(doc.split())
    return docs
