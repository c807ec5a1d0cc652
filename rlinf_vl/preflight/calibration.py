"""Files of what `calibrate` has measured, in the cache folder: one for each machine and model.

A machine is its processor, cores and GPUs; measurements of another one are not used.
"""

import hashlib
import json
import os
import platform
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from rlinf_vl.data.cache import cache_root
from rlinf_vl.preflight.decoding import Lengths
from rlinf_vl.preflight.gpus import gpu_memory
from rlinf_vl.preflight.rates import Rates


@dataclass(frozen=True)
class Calibration:
    """The measurements of one model on this machine.

    Attributes:
        rates: of one slot; `lengths`: of the config's own rows.
        model_path: the model that was measured; `device`: cpu or cuda.
        residual: share of the measured seconds that the fit leaves unexplained.
    """

    rates: Rates
    lengths: Lengths
    model_path: str
    device: str
    residual: float


def machine() -> str:
    """Return the fingerprint of this machine: 12 hex digits of its processor, cores and GPUs."""
    facts = [_processor(), platform.machine(), os.cpu_count(), gpu_memory()]
    return hashlib.sha256(repr(facts).encode()).hexdigest()[:12]


def save(calibration: Calibration) -> Path:
    """Write the file of a calibration, and return its path."""
    path = _path(calibration.device, calibration.model_path)
    path.parent.mkdir(parents=True, exist_ok=True)
    content = {
        "model_path": calibration.model_path,
        "device": calibration.device,
        "residual": calibration.residual,
        "rates": calibration.rates.as_dict(),
        "lengths": {name: getattr(calibration.lengths, name) for name in Lengths.__slots__},
    }
    path.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")
    return path


def find(device: str, model_path: str) -> Calibration | None:
    """Return this machine's calibration of a model; None where there is none."""
    path = _path(device, model_path)
    if not path.is_file():
        return None
    content = json.loads(path.read_text(encoding="utf-8"))
    try:
        rates, lengths = Rates(**content["rates"]), Lengths(**content["lengths"])
    except (KeyError, TypeError):  # of another version
        return None
    return Calibration(rates, lengths, model_path, device, content["residual"])


def fit(rows: list[list[float]], seconds: list[float]) -> tuple[np.ndarray, float]:
    """Return the factors >= 0 whose products with the rows are nearest to the seconds.

    The second value is the share of the seconds that is left: the mean distance over the mean.
    Relative distances are minimised, so that short measurements count as much as long ones. A
    factor that would be negative is 0.
    """
    matrix, target = np.array(rows, float), np.array(seconds, float)
    weighted = matrix / target[:, None]
    factors = np.zeros(matrix.shape[1])
    free = list(range(matrix.shape[1]))
    while free:
        solution, *_ = np.linalg.lstsq(weighted[:, free], np.ones(len(target)), rcond=None)
        if (solution >= 0).all():
            factors[free] = solution
            break
        free.pop(int(solution.argmin()))
    residual = np.abs(matrix @ factors - target).mean() / target.mean()
    return factors, float(residual)


def _path(device: str, model_path: str) -> Path:
    name = hashlib.sha256(model_path.encode()).hexdigest()[:12]
    return cache_root() / "calibration" / f"{machine()}-{device}-{name}.json"


def _processor() -> str:
    """Return the processor's name."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return platform.processor()
    return next((line for line in lines if line.startswith("model name")), platform.processor())
