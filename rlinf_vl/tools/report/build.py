"""Build the report: read the runs, pack the data of the page, and write it with its style and
scripts into one file.

The page can't fetch: its content security policy names its scripts and style by their hash, and
nothing else runs or loads. Texts of runs are escaped by the template, or go into one compressed
block, from which scripts show them as text.
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
from rlinf_vl.runtime.files import write_aside
from rlinf_vl.tools.report.run_files import RunFiles, read_run, standard_error
from rlinf_vl.tools.report.trajectories import ImageStore, encode_trajectories, read_trajectories

ASSETS = Path(__file__).parent / "assets"
PLOT_SCRIPT, MATH_SCRIPT = "uPlot.iife.min.js", "temml.min.js"
#: Scripts of the page in the order in which they are joined; page.js starts the others, so it is
#: last.
SCRIPTS = [
    "data.js",
    "charts.js",
    "math.js",
    "zoom.js",
    "conversation.js",
    "groups.js",
    "distributions.js",
    "gallery.js",
    "page.js",
]
STYLES = ("uPlot.min.css", "report.css")
#: Further metrics called reward/… that are not the mean of a part of the reward.
FURTHER_REWARD_METRICS = ("reward/ungradable", "reward/corrupted_mean", "reward/overlong_penalty")
#: Columns at most of the table of several runs: the first configuration keys that differ.
MAX_COMPARED_KEYS = 4
#: Keys that differ between any two runs, so a difference says nothing about the experiment.
NAMES_OF_A_RUN = ("runner.experiment_name", "runner.output_dir", "runner.resume_dir")
#: `time/*` of a step in stacking order; the rest of the step is "other".
PHASES = ("generate", "check", "train", "wait", "sync", "validate", "checkpoint")


def build_report(
    run_dirs: Sequence[Path],
    output: Path | None = None,
    *,
    max_bytes: int = 40_000_000,
    max_image_bytes: int = 24_000_000,
) -> Path:
    """Write one self-contained HTML file on a run, or on several side by side, and return its path.

    Args:
        run_dirs: folders of runs, still going or done. The report notes missing and broken files in
            them.
        output: the file; by default `report.html` in the run's folder, for several runs
            `report-vs-<others>.html` in the first one's.
        max_bytes: of trajectories over all runs, before compression, by `BYTES_PER_TRAJECTORY` and
            `BYTES_PER_TOKEN`. Groups beyond it are left out evenly over the steps, of training
            first.
        max_image_bytes: over all runs; images beyond it are left out.

    Raises:
        ValueError: no run, or a folder that isn't a run's.
    """
    if not run_dirs:
        raise ValueError("a report needs at least one run's folder")
    runs = [read_run(Path(folder)) for folder in run_dirs]
    if output is None:
        compared_names = "-".join(run.path.resolve().name for run in runs[1:])
        output = runs[0].path / (
            f"report-vs-{compared_names}.html" if compared_names else "report.html"
        )
    for i, run in enumerate(runs):  # the page labels runs by name, so names must differ
        if any(earlier_run.name == run.name for earlier_run in runs[:i]):
            run.name = f"{run.name} ({i + 1})"
    sections = bytearray()
    images = ImageStore(sections, max_image_bytes)
    packed = []
    for run in runs:
        table = read_trajectories(run.path, max_bytes // len(runs), run.notes)
        columns = encode_trajectories(table, run.path, sections, images, run.notes)
        packed.append(
            {
                "name": run.name,
                "metrics": _columns(run),
                "baselines": run.baselines,
                "trajectories": columns,
            }
        )
    header = {
        "runs": packed,
        "images": images.images,
        "phases": PHASES,
        "charts": json.loads(asset("charts.json")),
    }
    header["own_rewards"] = (*OWN_REWARD_METRICS, *FURTHER_REWARD_METRICS)
    page = _render(runs, [p["trajectories"]["count"] for p in packed], _pack(header, sections))
    with write_aside(output, durable=False) as aside:
        aside.write_text(page, encoding="utf-8", errors="replace")
    return output


def _columns(run: RunFiles) -> dict[str, list[list[float | None]]]:
    """Return metric name → [steps, values] of the steps that logged it, with two metrics that are
    computed here."""
    columns: dict[str, list[list[float | None]]] = {}
    for row in run.metrics:
        computed = {}
        if row.get("val/accuracy") is not None:
            computed["val/accuracy_error"] = standard_error(row)
        if step_s := row.get("time/step"):
            computed["time/other"] = max(
                0.0, step_s - sum(row.get(f"time/{phase}") or 0.0 for phase in PHASES)
            )
        for name, value in {**row, **computed}.items():
            if name != "step":
                steps, values = columns.setdefault(name, [[], []])
                steps.append(row["step"])
                values.append(value)
    return columns


def _pack(header: dict[str, Any], sections: bytearray) -> str:
    """Return gzip, in base64, of: uint32 length of the header, the header as JSON padded to four
    bytes, the sections."""
    text = json.dumps(header, allow_nan=False, separators=(",", ":")).encode()
    # A browser's typed arrays start at multiples of their items' size. Without a time stamp, the
    # same data make the same file.
    text += b" " * (-len(text) % 4)
    return base64.b64encode(
        gzip.compress(struct.pack("<I", len(text)) + text + bytes(sections), 5, mtime=0)
    ).decode()


def _render(runs: list[RunFiles], counts: list[int], data: str) -> str:
    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(ASSETS),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
    )
    environment.filters["duration"] = lambda seconds: timedelta(seconds=round(seconds))
    style, script = "\n".join(map(asset, STYLES)), "\n".join(map(asset, SCRIPTS))
    plot_script, math_script = asset(PLOT_SCRIPT), asset(MATH_SCRIPT)
    config = _side_by_side([run.config for run in runs])
    facts = _side_by_side([run.environment for run in runs])
    differences = {name: row for name, row in config.items() if len(set(row)) > 1}
    experiment_keys = [
        name
        for name in differences
        if name not in NAMES_OF_A_RUN and not name.startswith("runner.code_files")
    ]
    return environment.get_template("report.html.jinja").render(
        runs=runs,
        counts=counts,
        phases=PHASES,
        config=config,
        differences=differences,
        compared={name: differences[name] for name in experiment_keys[:MAX_COMPARED_KEYS]},
        git={name: row for name, row in facts.items() if name.startswith("git")},
        environment={name: row for name, row in facts.items() if not name.startswith("git")},
        policy=f"default-src 'none'; base-uri 'none'; form-action 'none'; img-src blob:; style-src {script_hash(style)}; "
        f"script-src {script_hash(plot_script)} {script_hash(math_script)} {script_hash(script)}",
        style=style,
        plot_script=plot_script,
        math_script=math_script,
        script=script,
        data=data,
    )


def _side_by_side(trees: list[dict[str, str]]) -> dict[str, list[str]]:
    """Return name → its value in each tree, "–" where there is none."""
    names = dict.fromkeys(name for tree in trees for name in tree)  # in the order of the files
    table = {}
    for name in names:
        table[name] = [tree.get(name, "–") for tree in trees]
    return table


def asset(name: str) -> str:
    return (ASSETS / name).read_text(encoding="utf-8")


def script_hash(text: str) -> str:
    """Return a text's hash in the form of a content security policy."""
    return f"'sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}'"
