"""What flows between the rooms: frozen dataclasses over bytes and numpy arrays; no torch, no Ray, nothing of ours.

Invariants: a sequence's per-token arrays have one length (asserted at every hand-over); sampled ids are trained on as they
are, never decoded and encoded again; an image travels once per group, named by the hash of its encoded bytes.
"""

from rlinf_vl.types.engine import Completion, Request, Sample, SamplingParams
from rlinf_vl.types.group import Group, GroupSummary
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
)
from rlinf_vl.types.training import MicroBatch, Prices, RowPart
from rlinf_vl.types.trajectory import TokenSequence, Trajectory, Turn, distinct_tokens

__all__ = [
    "Completion", "ENGINE_FAULT", "ENVIRONMENT_FAULT", "Grid", "Group", "GroupSummary", "IMAGE_URL_PREFIX",
    "ImageRef", "Message", "MicroBatch", "Prices", "Problem", "ROLES", "Request", "RowPart", "Sample", "SamplingParams",
    "TokenSequence", "Trajectory", "Turn", "UNGRADABLE", "distinct_tokens",
]  # fmt: skip
