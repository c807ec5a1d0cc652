"""A model card: the origin of a checkpoint, as README.md beside its weights, with curve, figures,
data and config."""

import json
import math
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jinja2
import yaml
from PIL import Image, ImageDraw, ImageFont

from rlinf_vl import __version__
from rlinf_vl.observe.metrics_file import flatten, read_metrics

TEMPLATES = Path(__file__).parent
CURVE = "curve.png"
#: Metrics of the card's table and their labels there.
FIGURES = {
    "val/accuracy": "validation accuracy",
    "reward/mean": "reward",
    "reward/accuracy": "accuracy of training answers",
    "rollout/response_length_mean": "tokens of an answer",
    "actor/entropy": "entropy",
    "actor/ref_kl": "KL to the model that it began with",
}
#: Names of config keys whose values are not published.
#: Folders of this machine, at the start of a text or of a word in it.
LOCAL_FOLDERS = re.compile(r"(?<![^\s='\"(\[,])/(?:[\w.@+~-]+/)+")
SECRET = re.compile(r"(api|access|auth).*key|secret|password|passwd|token$", re.IGNORECASE)


class _Line(NamedTuple):
    """A line of the curve's picture."""

    metric: str
    label: str
    color: str


_LINES = [
    _Line("reward/mean", "reward", "#2f81c7"),
    _Line("val/accuracy", "validation accuracy", "#d9772b"),
]
#: The picture in pixels. It is drawn at `_SCALE` times the size and made smaller: Pillow's lines
#: have no smooth edges.
_SIZE, _SCALE = (720, 400), 2
#: Margins in pixels, with room for ticks, legend and the axis' name.
_LEFT, _RIGHT, _TOP, _BOTTOM = 56, 20, 48, 44
_INK, _GRID = "#57606a", "#d0d7de"

Points = Sequence[tuple[float, float]]


def write_card(
    run_dir: Path, step: int, output: Path, *, base: str, on_hub: bool, vision: bool, adapters: bool
) -> None:
    """Write README.md and, if the run has logged anything, the picture of its curve into `output`.

    Args:
        step: of the checkpoint; later steps of the run are left out.
        base: the model that the run began with.
        on_hub: `base` is its name on the hub.
        vision: the model reads images.
        adapters: `output` holds adapters, and not a whole model.
    """
    notes: list[str] = []
    rows = [row for row in read_metrics(run_dir, notes) if (row["step"] or 0) <= step]
    config: dict[str, Any] = yaml.safe_load((run_dir / "config.yaml").read_text(encoding="utf-8"))
    series = {}
    for line in _LINES:
        series[line.metric] = [
            (r["step"] or 0, r[line.metric]) for r in rows if r.get(line.metric) is not None
        ]
    if any(len(points) > 1 for points in series.values()):
        draw_curve(series, output / CURVE)  # pyright: ignore[reportArgumentType]  # no None is left
    last = {name: row[name] for row in rows for name in FIGURES if row.get(name) is not None}
    data, algorithm = config["data"], config["algorithm"]
    entries = [
        (split, entry) for split in ("train", "val") for entry in data[f"{split}_data_paths"]
    ]
    files = config["runner"].get("code_files") or {}
    # The card is published: it names the user's files without their texts.
    config["runner"]["code_files"] = dict.fromkeys(files, "left out here")
    base_name = base if on_hub else f"path/to/{_shortened(base)}"
    text = (
        _environment()
        .get_template("model_card.md.jinja")
        .render(
            library="peft" if adapters else "transformers",
            task="image-text-to-text" if vision else "text-generation",
            auto_model="AutoModelForImageTextToText" if vision else "AutoModelForCausalLM",
            name=config["runner"]["experiment_name"],
            base=base_name,
            began_with=_shortened(config["rollout"]["model"]["model_path"]),
            hub_model=base if on_hub else None,
            hub_data=sorted(
                {entry[5:].partition(":")[0] for _, entry in entries if entry.startswith("hf://")}
            ),
            validation=", ".join(_shortened(entry) for split, entry in entries if split == "val"),
            accuracy={"value": last["val/accuracy"]} if "val/accuracy" in last else None,
            adapters=adapters,
            lora=config["actor"]["model"]["is_lora"],
            vision=vision,
            step=step,
            total=config["runner"]["max_steps"] if config["runner"]["max_steps"] > 0 else None,
            version=__version__,
            algorithm=algorithm["adv_type"],
            loss=algorithm["loss_type"],
            reward=_reward(config["reward"]),
            curve=CURVE if (output / CURVE).exists() else None,
            figures=[
                (label, f"{last[name]:.4g}") for name, label in FIGURES.items() if name in last
            ],
            data=_data_rows(entries, _json(run_dir / "datasets.json")),
            environment=_environment_rows(flatten(_json(run_dir / "environment.json"))),
            config=yaml.safe_dump(_public(config), sort_keys=False, allow_unicode=True, width=120),
        )
    )
    (output / "README.md").write_text(text, encoding="utf-8")


def draw_curve(series: dict[str, Points], path: Path) -> None:
    """Draw the lines in `_LINES` over the steps, on one scale, as a PNG (which the hub shows,
    unlike SVG)."""
    points = [point for line in series.values() for point in line]
    x_ticks = ticks(min(x for x, _ in points), max(x for x, _ in points), integers=True)
    y_ticks = ticks(min(0.0, *(y for _, y in points)), max(y for _, y in points))
    image = Image.new("RGB", (_SIZE[0] * _SCALE, _SIZE[1] * _SCALE), "white")
    draw, font = ImageDraw.Draw(image), ImageFont.load_default(12 * _SCALE)

    def to_pixels(x: float, y: float) -> tuple[float, float]:
        """Return the pixel, in the enlarged picture, of a step and a value."""
        right = _LEFT + (x - x_ticks[0]) / (x_ticks[-1] - x_ticks[0]) * (_SIZE[0] - _LEFT - _RIGHT)
        up = (y - y_ticks[0]) / (y_ticks[-1] - y_ticks[0]) * (_SIZE[1] - _TOP - _BOTTOM)
        return right * _SCALE, (_SIZE[1] - _BOTTOM - up) * _SCALE

    for y in y_ticks:
        draw.line([to_pixels(x_ticks[0], y), to_pixels(x_ticks[-1], y)], fill=_GRID, width=_SCALE)
        draw.text(
            (to_pixels(x_ticks[0], y)[0] - 8 * _SCALE, to_pixels(0, y)[1]),
            f"{y:g}",
            fill=_INK,
            font=font,
            anchor="rm",
        )
    for x in x_ticks:
        draw.text(
            (to_pixels(x, 0)[0], (_SIZE[1] - _BOTTOM + 8) * _SCALE),
            f"{x:g}",
            fill=_INK,
            font=font,
            anchor="ma",
        )
    draw.text(
        (_SIZE[0] * _SCALE / 2, (_SIZE[1] - 6) * _SCALE),
        "training step",
        fill=_INK,
        font=font,
        anchor="ms",
    )
    legend = _LEFT * _SCALE
    for name, label, color in _LINES:
        pixels = [to_pixels(x, y) for x, y in series.get(name, ())]
        if not pixels:
            continue
        draw.line(pixels, fill=color, width=2 * _SCALE, joint="curve")
        for x, y in pixels if len(pixels) <= 40 else ():  # more dots would hide the line
            draw.ellipse(
                [x - 3 * _SCALE, y - 3 * _SCALE, x + 3 * _SCALE, y + 3 * _SCALE], fill=color
            )
        draw.text((legend, 20 * _SCALE), label, fill=color, font=font)
        legend += draw.textlength(label, font=font) + 24 * _SCALE
    image.resize(_SIZE, Image.Resampling.LANCZOS).save(path, "PNG", optimize=True)


def ticks(low: float, high: float, *, integers: bool = False) -> list[float]:
    """Return four to eight round numbers, steps of 1, 2 or 5 times a power of ten, that enclose
    [low, high]."""
    if low == high:
        low, high = low - 0.5, high + 0.5
    # 0.999 and 1e-9: a bound that is a tick but for rounding errors gets no tick beyond it
    magnitude = 10.0 ** math.floor(math.log10((high - low) / 5))
    step = next(m * magnitude for m in (1, 2, 5, 10) if m * magnitude >= (high - low) / 5 * 0.999)
    if integers:
        step = max(1.0, step)
    first, last = math.floor(low / step + 1e-9), math.ceil(high / step - 1e-9)
    return [i * step for i in range(first, last + 1)]


def _environment() -> jinja2.Environment:
    loader = jinja2.FileSystemLoader(TEMPLATES)
    return jinja2.Environment(
        loader=loader, undefined=jinja2.StrictUndefined, trim_blocks=True, lstrip_blocks=True
    )


def _data_rows(
    entries: Sequence[tuple[str, str]], digests: dict[str, Any]
) -> list[tuple[str, str, Any, str]]:
    """Return split, name, bytes and digest of each entry of the data."""
    rows: list[tuple[str, str, Any, str]] = []
    for split, entry in entries:
        digest = digests.get(split, {}).get(entry, {})
        content_id = digest.get("sha256") or digest.get("revision") or "unknown"
        rows.append((split, _shortened(entry), digest.get("bytes", ""), content_id))
    return rows


def _environment_rows(environment: dict[str, Any]) -> list[tuple[str, Any]]:
    """Return name and value of the packages, the commit, Python and the GPUs of a run."""
    prefixes = ("packages.", "git.commit", "python", "gpus", "cuda")
    return [
        (name.removeprefix("packages."), value)
        for name, value in environment.items()
        if name.startswith(prefixes) and value not in ("null", "[]")
    ]


def _json(path: Path) -> dict[str, Any]:
    """Return the content of a file; empty if it is missing or broken."""
    try:
        return dict(json.loads(path.read_bytes()))
    except (OSError, ValueError, TypeError):
        return {}


def _shortened(entry: str) -> str:
    """Return an entry of the data without the folders of this machine, which a card must not
    publish."""
    return entry if "://" in entry else Path(entry).name


def _reward(reward: dict[str, Any]) -> str:
    """Return the reward as a sum of its functions, or its type."""
    parts = [
        (_shortened(part["function"]), part.get("weight", 1.0))
        for part in reward.get("functions") or ()
    ]
    formula = " + ".join(name if weight == 1 else f"{weight:g} · {name}" for name, weight in parts)
    return formula or _shortened(reward["reward_type"])


def _public(value: Any) -> Any:
    """Return a copy of the config without secret values and without folders of this machine."""
    if isinstance(value, dict):
        return {
            _public(key): "left out here"
            if SECRET.search(str(key)) and isinstance(item, str)
            else _public(item)
            for key, item in value.items()
        }
    if isinstance(value, str):
        return LOCAL_FOLDERS.sub("", value)
    return [_public(item) for item in value] if isinstance(value, list) else value
