"""The explanation of one key or metric of another system: `convert-config --explain KEY`."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from rlinf_vl.config.systems import SYSTEMS
from rlinf_vl.errors import ConfigError, nearest
from rlinf_vl.tools.convert.tables import UNSAID, Row, Table, quantities, table


def explain(key: str, system: str | None = None) -> str:
    """Return what becomes of a key or metric, a paragraph for each system that has it.

    Args:
        key: a whole name, or the end of one, such as rollout.n.
        system: one of `SYSTEMS`; None stands for all.

    Raises:
        ConfigError: no system has it.
    """
    tables = [table(name) for name in ([system] if system else SYSTEMS)]
    paragraphs = [text for one in tables for text in _paragraphs(key, one)]
    if not paragraphs:
        names = [name for one in tables for name in (*one.rows, *one.metrics)]
        titles = ", ".join(one.name for one in tables)
        raise ConfigError(f"--explain {key}: no key or metric of {titles};{nearest(key, names)}")
    return "\n".join(paragraphs)


def explanation(row: Row) -> str:
    """Return what becomes of a key, in a line."""
    if row.kind != "mapped":
        kind: str = row.kind
        if row.same and kind == "refused":
            kind += f" unless it is {_alternatives(row.same)}"
        return ": ".join(part for part in (kind, row.why.strip().rstrip(".")) if part)
    changed = {
        theirs: ours
        for theirs, ours in (row.values or {}).items()
        if _as_text(theirs) != _as_text(ours) and ours is not None
    }
    parts = [
        f"here {' and '.join(row.to)}",
        quantities()[row.role][1] if row.role else "",
        ", ".join(f"{_as_text(theirs)} is {_as_text(ours)}" for theirs, ours in changed.items()),
        row.note,
    ]
    if row.default is not UNSAID and isinstance(row.default, str | int | float | bool):
        parts.append(f"{_as_text(row.default)} where their file does not set it")
    return "; ".join(part for part in parts if part)


def _paragraphs(key: str, system_table: Table) -> Iterator[str]:
    """Yield what one system makes of the key."""
    for row in _rows(key, system_table):
        yield f"{system_table.name}: {row.theirs}\n  {explanation(row)}"
    for theirs in _with_end(key, system_table.metrics, "/"):
        yield f"{system_table.name}: {theirs} (a metric)\n  here {system_table.metrics[theirs]}"


def _rows(key: str, system_table: Table) -> list[Row]:
    """Return the rows of all keys that are the key or end with it; without any, a pattern's."""
    if rows := [system_table.rows[theirs] for theirs in _with_end(key, system_table.rows, ".")]:
        return rows
    pattern = system_table.row(key)
    return [pattern] if pattern else []


def _with_end(key: str, names: Mapping[str, Any], separator: str) -> list[str]:
    """Return the names that are the key, or that end with it after a separator."""
    return [name for name in names if name == key or name.endswith(separator + key)]


def _alternatives(values: Sequence[Any]) -> str:
    return " or ".join(_as_text(value) for value in values)


def _as_text(value: Any) -> str:
    if value is None:
        return "null"
    return str(value).lower() if isinstance(value, bool) else str(value)
