"""Limits on single values of a configuration."""

import copy
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

from rlinf_vl.user_code import Signature

T = TypeVar("T")


@dataclass(frozen=True)
class Limit:
    """A condition on one value: `must` ends the sentence "key: value must …". A null value meets
    every limit."""

    must: str
    holds: Callable[[Any], bool]
    may_be_infinite: bool = False


POSITIVE = Limit("be > 0", lambda x: x > 0)
# infinity switches the bound off
POSITIVE_OR_INFINITE = Limit("be > 0", lambda x: x > 0, may_be_infinite=True)
NOT_NEGATIVE = Limit("be >= 0", lambda x: x >= 0)
NOT_NEGATIVE_OR_INFINITE = Limit("be >= 0", lambda x: x >= 0, may_be_infinite=True)
AT_LEAST_1 = Limit("be at least 1", lambda x: x >= 1)
OFF_OR_POSITIVE = Limit("be -1 or at least 1", lambda x: x == -1 or x >= 1)
ALL_OR_NOT_NEGATIVE = Limit("be at least 0, or -1 for all", lambda x: x >= -1)
SHARE = Limit("lie in [0, 1]", lambda x: 0 <= x <= 1)
SHARE_OR_AUTO = Limit(
    "lie in (0, 1], or be auto", lambda x: 0 < x <= 1 if isinstance(x, float) else x == "auto"
)
TRUE_FALSE_OR_AUTO = Limit("be true, false or auto", lambda x: isinstance(x, bool) or x == "auto")
DECAY = Limit("lie in [0, 1)", lambda x: 0 <= x < 1)

DTYPES = ("fp32", "bf16", "fp16")
#: Model types: the names of the files of `rlinf_vl.models.families`. That room is above this one,
#: so its files are listed here and not imported.
FAMILIES = tuple(
    sorted(
        file.stem
        for file in Path(__file__).parents[2].glob("models/families/*.py")
        if file.stem != "__init__"
    )
)


class OrCode(tuple[str, ...]):
    """The strings that a value may be, beside `module:Name` and `path/to/file.py:Name`.

    It is empty where another table has the names. In a list of mappings, the `function` of each is
    such a name. `kind` and `signature`: see `rlinf_vl.user_code.load_code`; without them, the code is
    checked when it is loaded.
    """

    kind: str
    signature: Signature

    def __new__(
        cls, names: Iterable[str] = (), kind: str = "", signature: Signature = ""
    ) -> "OrCode":
        # Strings go to `__new__`, as a tuple can't be filled afterwards.
        allowed = super().__new__(cls, names)
        allowed.kind = kind
        allowed.signature = signature
        return allowed


def key(
    default: T, allowed: Limit | tuple[str, ...], summaries: Mapping[str, str] | None = None
) -> T:
    """Return a field whose value, or each of whose values, must meet the limit or be one of the
    strings.

    `summaries` describe some of the strings, behind the text under the field.
    """
    # A copy, since a list as the default would be shared by all configs.
    metadata = {"allowed": allowed, "summaries": summaries or {}}
    return field(default_factory=lambda: copy.copy(default), metadata=metadata)
