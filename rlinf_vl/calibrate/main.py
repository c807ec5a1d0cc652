"""The verb `calibrate`: measure, write the file, and print the rates."""

import sys

from rlinf_vl.calibrate.measure import measure
from rlinf_vl.config.schema import Config
from rlinf_vl.preflight.calibration import Calibration, save


def main(config: Config, model_path: str) -> int:
    """Measure the model at `model_path` on this machine, for about a minute."""
    calibration = measure(config, model_path, lambda text: print(text, file=sys.stderr, flush=True))
    path = save(calibration)
    sys.stdout.write(f"{render(calibration)}\nwritten to {path}\n")
    return 0


def render(calibration: Calibration) -> str:
    """Return the rates as lines."""
    rates = calibration.rates
    lines = [
        f"{rates.source}; {100 * calibration.residual:.0f} % of the seconds unexplained",
        f"- training: {rates.products / 1e9:.2f} GFLOP/s, {1e6 * rates.operation_s:.1f} µs an "
        "operation",
        f"- decoding: {rates.decode_products / 1e9:.2f} GFLOP/s, {1e3 * rates.decode_layer_s:.2f} "
        "ms a layer and step",
        f"- a group: {1e3 * rates.group_s:.1f} ms beside its tokens; a weight sync: "
        f"{1e3 * rates.sync_s:.1f} ms",
        f"- while all {rates.cores} cores compute, a slot takes {rates.full_slowdown:.2f} times as long"
        if rates.cores > 1
        else "- a slot has its device to itself",
        f"- memory {rates.host / 1e9:.1f} GB/s, rank to rank {rates.node / 1e9:.2f} GB/s, a "
        f"collective {1e3 * rates.collective_s:.2f} ms",
    ]
    return "\n".join(lines) + "\n"
