"""The estimate of a run's step, written into its folder for the report to compare.

Only a machine that `calibrate` has measured with the run's model has one.
"""

import copy
import json
import logging
from pathlib import Path

from rlinf_vl.config.automatic import settle_without_ledger
from rlinf_vl.config.placement import Placement, placement_of, slots_named
from rlinf_vl.config.schema import Config
from rlinf_vl.preflight.calibration import find
from rlinf_vl.preflight.decoding import Lengths
from rlinf_vl.preflight.rates import Rates

log = logging.getLogger(__name__)
#: The file in a run's folder.
PREDICTION = "prediction.json"
#: Tokens of a KV cache where only `rollout.max_running_requests` bounds what runs at once.
UNBOUNDED = 2**40


def known_rates(config: Config) -> tuple[Rates, Lengths] | None:
    """Return what `calibrate` measured on this machine with the config's model, None for nothing."""
    device = "cpu" if config.cluster.device == "cpu" else "cuda"
    calibration = find(device, config.rollout.model.model_path)
    return calibration and (calibration.rates, calibration.lengths)


def settled_on_cpu(config: Config) -> Config:
    """Return a copy with what `auto` is on a CPU."""
    settled = copy.deepcopy(config)
    settle_without_ledger(settled, "cpu")
    return settled


def write_prediction(
    config: Config, model_path: str, run_dir: Path, placement: Placement | None = None
) -> None:
    """Write the estimate of a run's step, if this machine was calibrated for it.

    `placement`: of its ranks and engines; None: as on a CPU with the slots that the config names.
    """
    calibrated = known_rates(config)
    if calibrated is None or config.data.messages_key is not None:
        return
    # After the look at the file: these imports take seconds.
    from rlinf_vl.preflight.model import Model
    from rlinf_vl.preflight.step_time import estimate_step

    rates, lengths = calibrated
    placement = placement or placement_of(config, (slots_named(config),))
    if config.cluster.device == "cpu":
        config = settled_on_cpu(config)
    model = Model(config, model_path)
    time = estimate_step(config, model, placement, rates, lengths, UNBOUNDED)
    content = {
        "source": rates.source,
        "schedule": time.schedule,
        "seconds": time.total,
        "phases": time.phases,
        "lengths": {name: getattr(lengths, name) for name in Lengths.__slots__},
    }
    (run_dir / PREDICTION).write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")
    log.info("a step is estimated to take %.3g s (%s)", time.total, rates.source)
