"""Build the report: read the runs, pack what the page shows, and write it with its style and scripts into one file.

The page can't fetch: its content security policy names its scripts and style by their hash, and nothing else runs or loads.
Texts of runs are escaped by the template, or go into one compressed block, from which scripts show them as text.
"""

import base64
import gzip
import hashlib
import json
import struct
from collections.abc import Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any

import jinja2

from rlinf_vl.observe.metrics import OWN_REWARD_METRICS
from rlinf_vl.report.run_folder import RunFolder, read_run, standard_error
from rlinf_vl.report.trajectories import ImageStore, encode_trajectories, read_trajectories
from rlinf_vl.runtime.files import write_aside

ASSETS = Path(__file__).parent / "assets"
PLOT_SCRIPT, MATH_SCRIPT = "uPlot.iife.min.js", "temml.min.js"
SCRIPTS = (
    *("data.js", "charts.js", "math.js", "zoom.js", "conversation.js", "groups.js", "distributions.js", "gallery.js"),
    "page.js",
)
STYLES = ("uPlot.min.css", "report.css")
FURTHER_REWARD_METRICS = ("reward/ungradable", "reward/corrupted_mean", "reward/overlong_penalty")
"""Metrics that are no part of the reward either."""
MOST_TOLD_APART = 4
"""Configuration keys that the table of several runs has as columns: the first ones that differ."""
NAMES_OF_A_RUN = ("runner.experiment_name", "runner.output_dir", "runner.resume_dir")
"""Keys that differ between any two runs, and are not what was tried."""
PHASES = ("generate", "check", "train", "wait", "sync", "validate", "checkpoint")
"""`time/*` of a step in stacking order; the rest of the step is "other"."""


def build_report(
    run_dirs: Sequence[Path],
    output: Path | None = None,
    *,
    max_bytes: int = 40_000_000,
    max_image_bytes: int = 24_000_000,
) -> Path:
    """Write one self-contained HTML file on a run, or on several side by side; returns its path.

    Args:
        run_dirs: folders of runs, still going or done. The report notes what is missing or broken in them.
        output: the file; by default `report.html` in the run's folder, for several runs `report-vs-<others>.html` in the
            first one's.
        max_bytes: of trajectories over all runs, before compression, by `BYTES_PER_TRAJECTORY` and `BYTES_PER_TOKEN`. Groups
            beyond it are left out evenly over the steps, of training first.
        max_image_bytes: over all runs; images beyond it are left out.

    Raises:
        ValueError: no run, or a folder that isn't a run's.
    """
    if not run_dirs:
        raise ValueError("a report needs at least one run's folder")
    runs = [read_run(Path(folder)) for folder in run_dirs]
    if output is None:
        others = "-".join(run.path.resolve().name for run in runs[1:])
        output = runs[0].path / (f"report-vs-{others}.html" if others else "report.html")
    for i, run in enumerate(runs):  # names that tell them apart
        if any(other.name == run.name for other in runs[:i]):
            run.name = f"{run.name} ({i + 1})"
    sections = bytearray()
    images = ImageStore(sections, max_image_bytes)
    packed = []
    for run in runs:
        table = read_trajectories(run.path, max_bytes // len(runs), run.notes)
        columns = encode_trajectories(table, run.path, sections, images, run.notes)
        packed.append({"name": run.name, "metrics": _columns(run), "baselines": run.baselines, "trajectories": columns})
    header = {"runs": packed, "images": images.images, "phases": PHASES, "charts": json.loads(_asset("charts.json"))}
    header["own_rewards"] = (*OWN_REWARD_METRICS, *FURTHER_REWARD_METRICS)
    page = _render(runs, [p["trajectories"]["count"] for p in packed], _pack(header, sections))
    with write_aside(output, durable=False) as aside:
        aside.write_text(page, encoding="utf-8", errors="replace")
    return output


def _columns(run: RunFolder) -> dict[str, list[list[float | None]]]:
    """Metric name → [steps, values] of the steps that logged it, with two that are computed here."""
    columns: dict[str, list[list[float | None]]] = {}
    for row in run.metrics:
        made = {}
        if row.get("val/accuracy") is not None:
            made["val/accuracy_error"] = standard_error(row)
        if step_s := row.get("time/step"):
            made["time/other"] = max(0.0, step_s - sum(row.get(f"time/{phase}") or 0.0 for phase in PHASES))
        for name, value in {**row, **made}.items():
            if name != "step":
                steps, values = columns.setdefault(name, [[], []])
                steps.append(row["step"])
                values.append(value)
    return columns


def _pack(header: dict[str, Any], sections: bytearray) -> str:
    """gzip of: uint32 length of the header, the header as JSON padded to four bytes, the sections. In base64."""
    text = json.dumps(header, allow_nan=False, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 4)
    return base64.b64encode(gzip.compress(struct.pack("<I", len(text)) + text + bytes(sections), 5, mtime=0)).decode()


def _render(runs: list[RunFolder], counts: list[int], data: str) -> str:
    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(ASSETS), autoescape=True, undefined=jinja2.StrictUndefined, trim_blocks=True
    )
    environment.filters["duration"] = lambda seconds: timedelta(seconds=round(seconds))
    style, script = "\n".join(map(_asset, STYLES)), "\n".join(map(_asset, SCRIPTS))
    plot_script, math_script = _asset(PLOT_SCRIPT), _asset(MATH_SCRIPT)
    config, facts = _side_by_side([run.config for run in runs]), _side_by_side([run.environment for run in runs])
    differences = {name: row for name, row in config.items() if len(set(row)) > 1}
    tried = [name for name in differences if name not in NAMES_OF_A_RUN and not name.startswith("runner.code_files")]
    return environment.get_template("report.html.jinja").render(
        runs=runs,
        counts=counts,
        phases=PHASES,
        config=config,
        differences=differences,
        told_apart={name: differences[name] for name in tried[:MOST_TOLD_APART]},
        git={name: row for name, row in facts.items() if name.startswith("git")},
        environment={name: row for name, row in facts.items() if not name.startswith("git")},
        policy=f"default-src 'none'; base-uri 'none'; form-action 'none'; img-src blob:; style-src {_hash(style)}; "
        f"script-src {_hash(plot_script)} {_hash(math_script)} {_hash(script)}",
        style=style,
        plot_script=plot_script,
        math_script=math_script,
        script=script,
        data=data,
    )


def _side_by_side(trees: list[dict[str, str]]) -> dict[str, list[str]]:
    """Name → its value in each, "–" where there is none."""
    return {name: [tree.get(name, "–") for tree in trees] for name in dict.fromkeys(n for tree in trees for n in tree)}


def _asset(name: str) -> str:
    return (ASSETS / name).read_text(encoding="utf-8")


def _hash(text: str) -> str:
    return f"'sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}'"
