"""The data types that packages of rlinf_vl exchange: dataclasses over bytes and numpy arrays.

They are frozen, and import neither torch nor Ray nor any other package of rlinf_vl. Invariants:

- The per-token arrays of a sequence have one length (asserted on construction).
- Sampled ids are trained on as they are, never decoded and encoded again.
- An image is sent once per group, identified by the hash of its encoded bytes.
"""

from rlinf_vl.types.engine import Completion, Request, Sample, SamplingParams
from rlinf_vl.types.group import Group, Reference
from rlinf_vl.types.problem import (
    ENGINE_FAULT,
    ENVIRONMENT_FAULT,
    IMAGE_URL_PREFIX,
    ROLES,
    UNGRADABLE,
    Grid,
    ImageRef,
    Message,
    Problem,
    TokenIds,
)
from rlinf_vl.types.summary import GroupSummary, TrajectorySummary
from rlinf_vl.types.training import MicroBatch, Prices, RowPart, TurnAdvantages
from rlinf_vl.types.trajectory import (
    READ_CALLS,
    UNREAD_CALLS,
    TokenSequence,
    Trajectory,
    Turn,
    distinct_tokens,
    shared_prefix,
)

__all__ = [
    "Completion", "ENGINE_FAULT", "ENVIRONMENT_FAULT", "Grid", "Group", "GroupSummary",
    "IMAGE_URL_PREFIX", "ImageRef", "Message", "MicroBatch", "Prices", "Problem", "READ_CALLS",
    "ROLES", "Reference", "Request", "RowPart", "Sample", "SamplingParams", "TokenIds",
    "TokenSequence", "Trajectory", "TrajectorySummary", "Turn", "TurnAdvantages", "UNGRADABLE",
    "UNREAD_CALLS", "distinct_tokens", "shared_prefix",
]  # fmt: skip
