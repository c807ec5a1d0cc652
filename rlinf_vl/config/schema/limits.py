"""Limits on single values of a configuration."""

import copy
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any, TypeVar

from rlinf_vl.code import Signature

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
AT_LEAST_1 = Limit("be at least 1", lambda x: x >= 1)
OFF_OR_POSITIVE = Limit("be -1 or at least 1", lambda x: x == -1 or x >= 1)
ALL_OR_NOT_NEGATIVE = Limit("be at least 0, or -1 for all", lambda x: x >= -1)
SHARE = Limit("lie in [0, 1]", lambda x: 0 <= x <= 1)
SHARE_OR_AUTO = Limit(
    "lie in (0, 1], or be auto", lambda x: 0 < x <= 1 if isinstance(x, float) else x == "auto"
)
DECAY = Limit("lie in [0, 1)", lambda x: 0 <= x < 1)
STORE_BYTES = Limit("be at least 78643200, Ray's minimum of 75 MiB", lambda x: x >= 75 * 2**20)

DTYPES = ("fp32", "bf16", "fp16")
#: Model types of `rlinf_vl.models.families`, repeated here because that imports torch.
FAMILIES = ("qwen3_vl", "qwen3_vl_moe", "qwen3_5", "qwen3_5_moe", "qwen2_5_vl", "qwen3")
#: Model types without a vision tower.
TEXT_FAMILIES = ("qwen3",)
#: Model types with mixtures of experts.
MIXTURE_FAMILIES = ("qwen3_vl_moe", "qwen3_5_moe")


class OrCode(tuple[str, ...]):
    """The strings that a value may be, beside `module:Name` and `path/to/file.py:Name`.

    It is empty where another table has the names. In a list of mappings, the `function` of each is
    such a name. `kind` and `signature`: see `rlinf_vl.code.load_code`; without them, the code is
    checked when it is loaded.
    """

    kind: str
    signature: Signature

    def __new__(
        cls, names: Iterable[str] = (), kind: str = "", signature: Signature = ""
    ) -> "OrCode":
        allowed = super().__new__(cls, names)
        allowed.kind = kind
        allowed.signature = signature
        return allowed


def key(default: T, allowed: Limit | tuple[str, ...]) -> T:
    """Return a field whose value, or each of whose values, must meet the limit or be one of the
    strings."""
    return field(default_factory=lambda: copy.copy(default), metadata={"allowed": allowed})
