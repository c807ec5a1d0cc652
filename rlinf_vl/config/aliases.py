"""What other systems call our keys. One table for each, `systems/NAME.yaml`, feeds `convert-config` (`rlinf_vl.config.foreign`), the
hints for unknown keys (`hint`) and docs/coming-from.md.

A table has, under `keys`, their key and what becomes of it: our key, or a mapping with
    to       our key
    role     a quantity that several of their keys give, or in other units: systems/quantities.yaml, `foreign.quantities`
    by       a conversion of `foreign.values.CONVERSIONS`
    values   their values and ours; another value is refused
    is       the values that mean what happens here anyway; another value is refused, or with `drop: true` dropped
    default  what it is where a file does not say, if that isn't ours
    why      the reason of a refusal; note: a remark for what is written
under `same` the keys that are ours, too; under `drop` and `refuse` keys by the reason (a name of systems/reasons.yaml); under
`always` our keys that the system has no name for; under `metrics` their metric names beside ours. A key with `*` is a pattern.
"""

import itertools
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from functools import cache
from pathlib import Path
from typing import Any, Literal

import yaml

_FOLDER = Path(__file__).with_name("systems")
#: Their names as they write them.
SYSTEMS = {"verl": "verl", "easyr1": "EasyR1", "trl": "TRL", "rlinf": "RLinf", "skyrl": "SkyRL"}
Kind = Literal["mapped", "dropped", "refused"]
#: No default in a table: ours is theirs.
UNSAID: Any = object()


@dataclass(frozen=True, slots=True)
class Row:
    """What becomes of one key, or of those that a pattern matches; see the module."""

    theirs: str
    kind: Kind
    to: tuple[str, ...] = ()
    role: str = ""
    by: str = ""
    values: Mapping[Any, Any] | None = None
    same: Sequence[Any] | None = None
    default: Any = UNSAID
    why: str = ""
    note: str = ""

    @property
    def is_pattern(self) -> bool:
        return "*" in self.theirs


@dataclass(frozen=True, slots=True)
class Table:
    """All that is known of one system."""

    name: str
    rows: dict[str, Row]
    patterns: tuple[Row, ...]
    always: dict[str, tuple[Any, str]]
    metrics: dict[str, str] = field(default_factory=dict)

    def row(self, key: str) -> Row | None:
        """The row of a key: its own, or the longest pattern's."""
        if row := self.rows.get(key):
            return row
        matches = [row for row in self.patterns if fnmatchcase(key, row.theirs)]
        return max(matches, key=lambda row: len(row.theirs), default=None)


@cache
def table(name: str) -> Table:
    """The table of one of `SYSTEMS`."""
    data, reasons = written(name), written("reasons")
    rows = [*_rows(data.get("keys", {}), reasons), *(Row(key, "mapped", (key,)) for key in data.get("same", ()))]
    sections: tuple[tuple[str, Kind], ...] = (("drop", "dropped"), ("refuse", "refused"))
    for section, kind in sections:
        for reason, keys in data.get(section, {}).items():
            rows += [Row(key, kind, why=reasons[reason]) for pattern in keys for key in _braces(pattern)]
    exact: dict[str, Row] = {}
    for row in rows:
        if not row.is_pattern:
            exact.setdefault(row.theirs, row)
    patterns = tuple(row for row in rows if row.is_pattern)
    return Table(SYSTEMS[name], exact, patterns, data.get("always", {}), data.get("metrics", {}))


@cache
def quantities() -> dict[str, tuple[tuple[str, ...], str]]:
    """Role → our keys, and how it becomes them ("" where it simply does)."""
    return {role: (_as_tuple(row["to"]), row.get("how", "")) for role, row in written("quantities").items()}


def system_of(keys: Sequence[str]) -> str | None:
    """The name of the system whose table knows most of some keys; None if no table knows more than a few."""
    known = {name: sum(key in table(name).rows for key in keys) for name in SYSTEMS}
    best = max(known, key=lambda name: known[name])
    return best if known[best] >= min(3, len(keys)) and known[best] else None


def hint(key: str, nested: bool = False) -> str:
    """What other systems mean by a name that isn't a key of ours, and ours for that; "" if no table has it.

    Args:
        key: a dotted name.
        nested: names that theirs end with, such as rollout.n, or that end as theirs do, such as algorithm.num_generations.
    """
    found: dict[str, list[str]] = {}
    leaf = key.rpartition(".")[2]
    for name in SYSTEMS:
        rows = table(name).rows
        ends = (k for k in rows if k.endswith(f".{key}"))
        leaves = (k for k in rows if k.rpartition(".")[2] == leaf)
        row = rows.get(key) if not nested else next((rows[k] for k in itertools.chain(ends, leaves)), None)
        if row and row.to != (key,):
            found.setdefault(_meaning(row), []).append(SYSTEMS[name])
    if not found:
        return ""
    return " " + "; ".join(f"{' and '.join(names)}: {meaning}" for meaning, names in found.items())


def _meaning(row: Row) -> str:
    if row.kind != "mapped":
        return f"{row.why}; leave it out"
    how = quantities()[row.role][1] if row.role else ""
    return f"here it is {' and '.join(row.to)}{f' ({how})' if how else ''}"


def _rows(keys: Mapping[str, Any], reasons: Mapping[str, str]) -> Iterator[Row]:
    for theirs, written in keys.items():
        row: dict[str, Any] = {"to": written} if isinstance(written, str) else written
        role, why = row.get("role", ""), row.get("why", "")
        to = quantities()[role][0] if role else _as_tuple(row.get("to", ()))
        kind = "mapped" if to else "dropped" if row.get("drop") else "refused"
        yield Row(
            theirs,
            kind,
            to,
            role,
            row.get("by", ""),
            row.get("values"),
            row.get("is"),
            row.get("default", UNSAID),
            reasons.get(why, why),
            row.get("note", ""),
        )


def _braces(pattern: str) -> Iterator[str]:
    """`a.{b,c}.d` → a.b.d, a.c.d."""
    if match := re.search(r"\{([^{}]*)\}", pattern):
        for part in match[1].split(","):
            yield from _braces(pattern[: match.start()] + part.strip() + pattern[match.end() :])
    else:
        yield pattern


def _as_tuple(value: Any) -> tuple[str, ...]:
    return (value,) if isinstance(value, str) else tuple(value)


@cache
def written(name: str) -> dict[str, Any]:
    """What a file of systems/ says, as it stands there."""
    loader = getattr(yaml, "CSafeLoader", yaml.SafeLoader)  # the one in C is ten times as fast
    return yaml.load((_FOLDER / f"{name}.yaml").read_text(encoding="utf-8"), loader)  # noqa: S506
