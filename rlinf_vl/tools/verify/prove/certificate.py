"""The certificate of a family: which paths were proven, and which are wrong."""

import json
import platform
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any, Literal

from rlinf_vl.tools.verify.prove.proofs import Figures, Proofs, Refused

#: Packages on whose versions the figures depend.
PACKAGES = ("rlinf_vl", "torch", "transformers", "peft", "numpy")
MAX_REASON = 600


@dataclass(frozen=True)
class Outcome:
    """The outcome of one path.

    Attributes:
        status: wrong, if a figure is above its limit or the path fails; refused, if the family does
            not have it.
        figures: the largest differences, see `rlinf_vl.tools.verify.prove.proofs`.
        reason: why the path was refused, or how it failed.
    """

    path: str
    status: Literal["proven", "wrong", "refused"]
    figures: tuple[float, ...] = ()
    limit: float = 0.0
    reason: str = ""


def outcomes_of(
    proofs: Proofs, paths: Callable[[str], bool] = lambda path: True
) -> Iterator[Outcome]:
    """Run the proofs of the chosen paths, one after another."""
    for path, prove in proofs.paths.items():
        if paths(path):
            yield _outcome(path, prove, proofs.limit)


def _outcome(path: str, prove: Callable[[], Figures], limit: float) -> Outcome:
    try:
        figures = prove()
    except Refused as error:
        return Outcome(path, "refused", reason=str(error))
    except Exception as error:  # the code of an unknown family may raise anything
        text = " ".join(f"{type(error).__name__}: {error}".split())
        # A rank's traceback ends with its error.
        text = text if len(text) <= MAX_REASON else f"… {text[-MAX_REASON:]}"
        return Outcome(path, "wrong", reason=text)
    # A figure that is no number is within no limit.
    is_within = all(value <= limit for value in figures)
    return Outcome(path, "proven" if is_within else "wrong", figures, limit)


def write_certificate(
    file: Path, checkpoint: str, config: dict[str, Any], outcomes: list[Outcome]
) -> None:
    """Write a certificate: the model, the tiny member, versions, and the outcome of each path."""
    paths = [asdict(outcome) for outcome in outcomes]
    content = {"checkpoint": checkpoint, "model_type": config["model_type"], "proven": False}
    _write(file, content | {"paths": paths, "versions": _versions(), "member": config})


def add_to_certificate(
    file: Path, order: Sequence[str], config: dict[str, Any], outcomes: list[Outcome]
) -> None:
    """Put outcomes of the member in a certificate into it, in place of older ones of their paths.

    Where other versions measured them than those of the certificate, they have their own.

    Args:
        order: of all paths.
        config: the member's.
    """
    content = json.loads(file.read_text("utf-8"))
    versions = _versions()
    apart = {} if versions == content["versions"] else {"versions": versions}
    paths = {path["path"]: path for path in content["paths"]}
    paths |= {outcome.path: asdict(outcome) | apart for outcome in outcomes}
    content["paths"] = [paths[path] for path in order if path in paths]
    _write(file, content | {"member": config})


def _versions() -> dict[str, str]:
    return {"python": platform.python_version()} | {
        package: version(package) for package in PACKAGES
    }


def _write(file: Path, content: dict[str, Any]) -> None:
    content["proven"] = all(path["status"] != "wrong" for path in content["paths"])
    file.write_text(json.dumps(content, indent=2, default=str) + "\n", encoding="utf-8")
