"""Keys of other systems and ours.

One table for each system, `systems/NAME.yaml`, feeds `convert-config` with its `--explain`, the
hints for unknown keys (`hint`) and docs/coming-from.md.

Under `keys`, a table has each of their keys with our key, or with a mapping of

- to: our key;
- role: a quantity that several of their keys give, or in other units (systems/quantities.yaml,
  `rlinf_vl.tools.convert.quantities`);
- by: a conversion of `rlinf_vl.tools.convert.values.CONVERSIONS`;
- values: their values and ours; another value is refused;
- is: values with the meaning that we have anyway; another value is refused, or dropped with
  `drop: true`;
- default: their default, if it differs from ours;
- why: the reason of a refusal; note: a remark for the converted key.

Under `same` are the keys that both have; under `drop` and `refuse` keys by reason (a name in
systems/reasons.yaml); under `always` our keys without a name in that system; under `metrics` their
metric names and ours. A key with `*` is a pattern.
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

from rlinf_vl.config.systems import SYSTEMS

_FOLDER = Path(__file__).with_name("systems")
Kind = Literal["mapped", "dropped", "refused"]
#: Marks a row without a default: theirs equals ours.
UNSAID: Any = object()


@dataclass(frozen=True, slots=True)
class Row:
    """The conversion of one key, or of the keys that a pattern matches; the module describes the
    fields."""

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
    """The table of one system."""

    name: str
    rows: dict[str, Row]
    patterns: tuple[Row, ...]
    always: dict[str, tuple[Any, str]]
    metrics: dict[str, str] = field(default_factory=dict)

    def row(self, key: str) -> Row | None:
        """Return the row of a key: its own, or that of the longest matching pattern."""
        if row := self.rows.get(key):
            return row
        matches = [row for row in self.patterns if fnmatchcase(key, row.theirs)]
        return max(matches, key=lambda row: len(row.theirs), default=None)


@cache
def table(name: str) -> Table:
    """Return the table of one of `SYSTEMS`."""
    data, reasons = written(name), written("reasons")
    rows = [
        *_rows(data.get("keys", {}), reasons),
        *(Row(key, "mapped", (key,)) for key in data.get("same", ())),
    ]
    sections: tuple[tuple[str, Kind], ...] = (("drop", "dropped"), ("refuse", "refused"))
    for section, kind in sections:
        for reason, keys in data.get(section, {}).items():
            rows += [
                Row(key, kind, why=reasons[reason]) for pattern in keys for key in _braces(pattern)
            ]
    # The first row of a key wins, so `keys` has priority over the sections below it.
    exact: dict[str, Row] = {}
    for row in rows:
        if not row.is_pattern:
            exact.setdefault(row.theirs, row)
    patterns = tuple(row for row in rows if row.is_pattern)
    return Table(SYSTEMS[name], exact, patterns, data.get("always", {}), data.get("metrics", {}))


@cache
def quantities() -> dict[str, tuple[tuple[str, ...], str]]:
    """Return role → (our keys, a remark on the conversion or "")."""
    return {
        role: (_as_tuple(row["to"]), row.get("how", ""))
        for role, row in written("quantities").items()
    }


def system_of(keys: Sequence[str]) -> str | None:
    """Return the name of the system whose table has most of the keys.

    None if no table has three of them, or all of fewer keys.
    """
    known_keys = dict.fromkeys(SYSTEMS, 0)
    for name in SYSTEMS:
        rows = table(name).rows
        known_keys[name] = sum(key in rows for key in keys)
    system = max(known_keys, key=lambda name: known_keys[name])
    return system if known_keys[system] >= min(3, len(keys)) and known_keys[system] else None


def hint(key: str, nested: bool = False) -> str:
    """Return the meaning of a name in other systems, with our key for it; "" if no table has it.

    Args:
        key: a dotted name that isn't one of our keys.
        nested: match a name that one of their keys ends with, such as rollout.n, or that has the
            leaf of one, such as algorithm.num_generations.
    """
    systems_by_meaning: dict[str, list[str]] = {}
    leaf = key.rpartition(".")[2]
    for name in SYSTEMS:
        rows = table(name).rows
        ends = (k for k in rows if k.endswith(f".{key}"))
        leaves = (k for k in rows if k.rpartition(".")[2] == leaf)
        # A name that theirs ends with is more likely meant than one with the same leaf only.
        row = (
            rows.get(key)
            if not nested
            else next((rows[k] for k in itertools.chain(ends, leaves)), None)
        )
        # A key with the same name in both systems needs no hint.
        if row and row.to != (key,):
            systems_by_meaning.setdefault(_meaning(row), []).append(SYSTEMS[name])
    if not systems_by_meaning:
        return ""
    return " " + "; ".join(
        f"{' and '.join(names)}: {meaning}" for meaning, names in systems_by_meaning.items()
    )


def _meaning(row: Row) -> str:
    """Return the second half of a hint: our keys for a row, or why there are none."""
    if row.kind != "mapped":
        return f"{row.why}; leave it out"
    how = quantities()[row.role][1] if row.role else ""
    return f"here it is {' and '.join(row.to)}{f' ({how})' if how else ''}"


def _rows(keys: Mapping[str, Any], reasons: Mapping[str, str]) -> Iterator[Row]:
    """Yield the rows of a table's section `keys`."""
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
    """Yield the keys of a pattern: a.b.d and a.c.d for `a.{b,c}.d`."""
    if match := re.search(r"\{([^{}]*)\}", pattern):
        for part in match[1].split(","):
            yield from _braces(pattern[: match.start()] + part.strip() + pattern[match.end() :])
    else:
        yield pattern


def _as_tuple(value: Any) -> tuple[str, ...]:
    return (value,) if isinstance(value, str) else tuple(value)


@cache
def written(name: str) -> dict[str, Any]:
    """Return the content of a file of systems/."""
    loader = getattr(yaml, "CSafeLoader", yaml.SafeLoader)  # the one in C is ten times as fast
    return yaml.load((_FOLDER / f"{name}.yaml").read_text(encoding="utf-8"), loader)  # noqa: S506
