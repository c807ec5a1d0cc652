"""A line chart as a small SVG file, written by hand: the learning curves of README and docs.

`python docs/learning_curve.py OUT.svg NAME=RUN_DIR …` draws the validation accuracy of runs. `NAME@METRIC=RUN_DIR` draws another
metric; of several runs, `NAME=RUN_DIR,RUN_DIR,…`, the mean is drawn, in a band from the lowest to the highest.
"""

import argparse
import math
from collections.abc import Mapping, Sequence
from itertools import groupby
from pathlib import Path
from statistics import fmean
from xml.sax.saxutils import escape

from rlinf_vl.extras.export.card import ticks
from rlinf_vl.runtime.files import read_lines

WIDTH, HEIGHT = 720, 400
LEFT, RIGHT, TOP, BOTTOM = 64, 20, 64, 52
#: Mid-tones that differ on a white page, on a black one, and to colour-blind eyes; so do the greys of text and grid.
COLORS = ("#2f81c7", "#d9772b", "#3a9d5d", "#b8579e", "#a08a1f", "#6f74c9")
TEXT, GRID = "#7d8590", "#7d859055"

Point = tuple[float, float | None]


def draw_curve(
    series: Mapping[str, Sequence[Point]], path: str | Path, title: str, y_label: str
) -> None:
    """Writes lines of value over step to `path`.

    Args:
        series: name → (step, value) points; a value that is None or not finite is left out. Where a step has several values,
            the line goes through their mean, and a band from the lowest to the highest.

    Raises:
        ValueError: there is no point to draw.
    """
    lines = {
        name: sorted((float(x), float(y)) for x, y in points if y is not None and math.isfinite(y))
        for name, points in series.items()
    }
    points = [point for line in lines.values() for point in line]
    if not points:
        raise ValueError(
            f"nothing to draw: no finite point in the series {', '.join(series) or '(none)'}"
        )
    xs, ys = zip(*points, strict=True)
    x_ticks = ticks(min(xs), max(xs), integers=True)
    low, high = min(ys), max(ys)
    y_ticks = ticks(0.0 if 0 < low < high / 2 else low, high)

    def x_of(x: float) -> float:
        return LEFT + (x - x_ticks[0]) / (x_ticks[-1] - x_ticks[0]) * (WIDTH - LEFT - RIGHT)

    def y_of(y: float) -> float:
        return (
            HEIGHT
            - BOTTOM
            - (y - y_ticks[0]) / (y_ticks[-1] - y_ticks[0]) * (HEIGHT - TOP - BOTTOM)
        )

    svg = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" width="{WIDTH}" height="{HEIGHT}"',
        f'role="img" font-family="system-ui, sans-serif" font-size="12" fill="{TEXT}">',
        f"<title>{escape(title)}</title>",
        f'<text x="{LEFT}" y="22" font-size="15" font-weight="600">{escape(title)}</text>',
    ]
    for y in y_ticks:
        svg.append(f'<path d="M{LEFT} {y_of(y):.1f}H{WIDTH - RIGHT}" stroke="{GRID}"/>')
        svg.append(f'<text x="{LEFT - 8}" y="{y_of(y) + 4:.1f}" text-anchor="end">{y:g}</text>')
    for x in x_ticks:
        svg.append(f'<path d="M{x_of(x):.1f} {HEIGHT - BOTTOM}v5" stroke="{TEXT}"/>')
        svg.append(
            f'<text x="{x_of(x):.1f}" y="{HEIGHT - BOTTOM + 19}" text-anchor="middle">{x:g}</text>'
        )
    svg.append(
        f'<path d="M{LEFT} {TOP}V{HEIGHT - BOTTOM}H{WIDTH - RIGHT}" fill="none" stroke="{TEXT}"/>'
    )
    middle = (TOP + HEIGHT - BOTTOM) / 2
    svg.append(
        f'<text x="{(LEFT + WIDTH - RIGHT) / 2}" y="{HEIGHT - 12}" text-anchor="middle">training step</text>'
    )
    svg.append(
        f'<text x="18" y="{middle}" text-anchor="middle" transform="rotate(-90 18 {middle})">{escape(y_label)}</text>'
    )
    legend_x, legend_y = float(LEFT), 44
    for i, (name, line) in enumerate(lines.items()):
        color = COLORS[i % len(COLORS)]
        dash = ' stroke-dasharray="6 4"' if i >= len(COLORS) else ""
        values = {x: [y for _, y in same] for x, same in groupby(line, key=lambda point: point[0])}
        if len(values) < len(line):
            edge = [(x, max(ys)) for x, ys in values.items()] + [
                (x, min(ys)) for x, ys in reversed(values.items())
            ]
            band = " ".join(f"{x_of(x):.1f},{y_of(y):.1f}" for x, y in edge)
            svg.append(f'<polygon points="{band}" fill="{color}" fill-opacity="0.18"/>')
        at = [(f"{x_of(x):.1f}", f"{y_of(fmean(ys)):.1f}") for x, ys in values.items()]
        svg.append(
            f'<polyline points="{" ".join(",".join(p) for p in at)}" fill="none" stroke="{color}" stroke-width="2" '
            f'stroke-linejoin="round"{dash}/>'
        )
        if len(at) <= 40:
            svg.extend(f'<circle cx="{x}" cy="{y}" r="3" fill="{color}"/>' for x, y in at)
        if legend_x + 24 + 7 * len(name) > WIDTH:
            legend_x, legend_y = float(LEFT), legend_y + 14
        svg.append(
            f'<path d="M{legend_x:.0f} {legend_y}h18" stroke="{color}" stroke-width="3"{dash}/>'
        )
        svg.append(f'<text x="{legend_x + 24:.0f}" y="{legend_y + 4}">{escape(name)}</text>')
        legend_x += 48 + 7 * len(name)
    svg.append("</svg>")
    Path(path).write_text("\n".join(svg) + "\n", encoding="utf-8")


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        prog="python docs/learning_curve.py", description="Draw a metric of runs."
    )
    parser.add_argument("out", metavar="OUT.svg")
    parser.add_argument("runs", metavar="NAME[@METRIC]=RUN_DIR[,RUN_DIR…]", nargs="+")
    parser.add_argument("--title", default="Validation accuracy")
    parser.add_argument("--label", default="val/accuracy", help="of the vertical axis")
    options = parser.parse_args(arguments)
    series: dict[str, list[Point]] = {}
    for run in options.runs:
        named, equals, folders = run.partition("=")
        name, _, metric = named.partition("@")
        metric = metric or "val/accuracy"
        if not equals:
            parser.error(f"{run!r} is not NAME=RUN_DIR")
        series[name] = []
        for folder in folders.split(","):
            metrics_file = Path(folder) / "metrics.jsonl"
            if not metrics_file.exists():
                parser.error(f"{metrics_file} does not exist")
            found = [
                (row["step"], row[metric]) for row in read_lines(metrics_file)[0] if metric in row
            ]
            if not found:
                parser.error(f"{metrics_file} has no {metric}")
            series[name] += found
    draw_curve(series, options.out, options.title, options.label)


if __name__ == "__main__":
    main()
