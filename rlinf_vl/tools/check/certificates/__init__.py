"""Certificates that come with the package: what `rlinf-vl prove-family` said of model types.

A certificate is a file here, named by its model type. docs/models.md has their figures, and those
of the families that have a file of their own, which tests measure.
"""

import json
from collections.abc import Collection
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from rlinf_vl.models.families import FAMILIES

FOLDER = Path(__file__).parent


@dataclass(frozen=True)
class Certificate:
    """The proofs of a model type.

    Attributes:
        paths: by path, the largest differences that were measured.
        wrong: by path that does not compute what transformers computes, why.
        refused: by path that there is not, why.
        transformers: the version of transformers that was compared with.
        order: all these paths, cheap ones first.
    """

    model_type: str
    paths: dict[str, tuple[float, ...]]
    wrong: dict[str, str]
    refused: dict[str, str]
    transformers: str
    order: tuple[str, ...] = ()

    @classmethod
    def of(cls, content: dict[str, Any]) -> "Certificate":
        """Read the content of a file that `prove-family --output` wrote."""
        by_status: dict[str, list[dict[str, Any]]] = {"proven": [], "wrong": [], "refused": []}
        for outcome in content["paths"]:
            by_status[outcome["status"]].append(outcome)
        return cls(
            content["model_type"],
            {outcome["path"]: tuple(outcome["figures"]) for outcome in by_status["proven"]},
            {
                outcome["path"]: outcome["reason"] or f"differs by {max(outcome['figures']):.1e}"
                for outcome in by_status["wrong"]
            },
            {outcome["path"]: outcome["reason"] for outcome in by_status["refused"]},
            content["versions"]["transformers"],
            tuple(outcome["path"] for outcome in content["paths"]),
        )


@cache
def certificates() -> dict[str, Certificate]:
    """Return the certificates by model type."""
    files = sorted(FOLDER.glob("*.json"))
    return {file.stem: Certificate.of(json.loads(file.read_text("utf-8"))) for file in files}


def not_proven(model_type: str, path: str = "") -> str:
    """Return a sentence about a model type without a certificate, "" for one that is proven.

    Args:
        path: one that a run takes, which a certificate may lack.
    """
    certificate = certificates().get(model_type)
    if model_type in FAMILIES or (certificate and (not path or path in certificate.paths)):
        return ""
    if certificate:
        return (
            f"nobody has proven the path {path!r} of models of type {model_type!r}: run "
            f"rlinf-vl prove-family with this checkpoint and --paths {path}"
        )
    return (
        f"nobody has proven that models of type {model_type!r} are computed here as in "
        "transformers: run rlinf-vl prove-family with this checkpoint, a minute on a CPU"
    )


def refused_path(model_type: str, path: str) -> str:
    """Return why the certificate of a model type refuses a path, "" if it does not."""
    certificate = certificates().get(model_type)
    return certificate.refused.get(path, "") if certificate else ""


def proven_wrong(model_type: str, unused: Collection[str] = ()) -> str:
    """Return a sentence about what was proven wrong of a model type, "" if nothing was.

    Args:
        unused: paths that a run does not take.
    """
    certificate = certificates().get(model_type)
    if certificate is None:
        return ""
    wrong = {path: why for path, why in certificate.wrong.items() if path not in unused}
    if not wrong:
        return ""
    path, reason = next(iter(wrong.items()))
    return (
        f"models of type {model_type!r} are not computed here as in transformers "
        f"{certificate.transformers} ({path}: {reason})"
    )
