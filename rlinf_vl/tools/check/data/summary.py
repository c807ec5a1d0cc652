"""The figures of a data set: as plain values (`check-data`'s JSON), and as a page of text."""

from collections import Counter, defaultdict
from collections.abc import Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from rlinf_vl.config import Config
from rlinf_vl.config.imitation import row_limit
from rlinf_vl.data.dataset import FilterResult
from rlinf_vl.data.unusable import shorten
from rlinf_vl.tools.check.data.look import PIXEL_BUDGETS, RowFacts

#: Bins of a histogram; examples of one kind in the text; characters of an example.
BINS, EXAMPLES, EXAMPLE_CHARACTERS = 24, 3, 110
_BARS = "▁▂▃▄▅▆▇█"
#: Values of data.max_prompt_length that the report compares.
_LENGTHS = tuple(2**k for k in range(5, 18))


@dataclass(frozen=True)
class Split:
    """The inspected rows of a split: the verdict of training on them, and the facts of those that
    are problems."""

    name: str
    paths: Sequence[str]
    ids: Sequence[str]
    result: FilterResult
    facts: Sequence[RowFacts]

    @property
    def usable(self) -> list[RowFacts]:
        """Return the facts of the rows that training would use."""
        return [facts for facts in self.facts if facts.row in self.result.kept]


def summarize(
    splits: Sequence[Split], config: Config, model: str | None, seconds: float
) -> dict[str, Any]:
    """Return all figures in the form of the JSON file.

    Rows are numbers from 0. `problems` are sentences; training would stop for those in `refused`.
    """
    limit = row_limit(config)
    by_name = {split.name: split for split in splits}
    figures = {split.name: _figures(split, config, model is not None) for split in splits}
    overlap = _overlap(by_name["train"], by_name["val"]) if "val" in by_name else {}
    refused = [
        problem for split in splits for problem in _refusals(split, figures[split.name], config)
    ]
    return {
        "model": model,
        "seconds": round(seconds, 1),
        "limits": {
            "length": {"of": limit.subject, "key": limit.key, "value": limit.value},
            "data.max_prompt_length": config.data.max_prompt_length,
            "data.overlong": config.data.overlong,
            "data.image_max_pixels": config.data.image_max_pixels,
            "data.max_bad_rows": config.data.max_bad_rows,
        },
        "refused": refused,
        "problems": [*refused, *_warnings(figures, overlap, config)],
        "splits": figures,
        "overlap": overlap,
    }


def _figures(split: Split, config: Config, tokens: bool) -> dict[str, Any]:
    """Return the figures of a split; those of tokens only if `tokens` were counted."""
    result, facts, usable = split.result, split.facts, split.usable
    kinds = Counter(row.kind for row in result.bad.values())
    answers = Counter(row.answer for row in usable)
    figures: dict[str, Any] = {
        "paths": list(split.paths),
        "rows": len(split.ids),
        "usable": len(result.kept),
        "bad": {
            "rows": len(result.bad),
            "by_kind": dict(kinds.most_common()),
            "all": [
                {"row": n, "id": b.id, "kind": b.kind, "reason": b.reason}
                for n, b in result.bad.items()
            ],
        },
        "text_only": [{"row": n, "id": row_id} for n, row_id in result.text_only.items()],
        "unused_keys": result.unused_keys,
        "images_dropped": sum(facts.dropped_images for facts in result.facts.values()),
        "too_long": [
            {"row": n, "id": split.ids[n], "tokens": t} for n, t in result.too_long.items()
        ],
        "cut": [
            {"row": n, "id": split.ids[n], "tokens": t, "images_lost": lost}
            for n, (t, lost) in result.cut.items()
        ],
        "images": _images(facts),
        "videos": _videos(facts),
        "answers": {
            "distinct": len(answers),
            "most_common": [[answer, rows] for answer, rows in answers.most_common(10)],
        },
        "duplicates": {
            "rows": _repeated((row.row, (row.text, _image_hashes(row))) for row in facts),
            "images": _repeated(
                (row.row, hash) for row in facts for hash in dict.fromkeys(_image_hashes(row))
            ),
        },
    }
    answer_of_row = {row.row: row.answer for row in facts}
    # of one question with two answers, at most one can be graded as right
    figures["contradictions"] = []
    for group in figures["duplicates"]["rows"]:
        if len({answer_of_row[row] for row in group}) > 1:
            figures["contradictions"].append(group)
    if tokens:
        figures["tokens"] = {
            row_limit(config).subject: _spread([row.tokens for row in facts]),
            "text": _spread([row.tokens - _image_tokens(row, 0) for row in facts]),
            "images": _spread([_image_tokens(row, 0) for row in facts if row.images]),
        }
        figures["budgets"] = _budgets(facts, row_limit(config).value, config.data.image_max_pixels)
    return figures


def _images(facts: Sequence[RowFacts]) -> dict[str, Any]:
    """Return the figures of the images of these rows."""
    images = [image for row in facts for image in row.images if not image.frames]
    # sizes are of distinct images: one that many rows share would hide the others
    distinct = {image.hash: image for image in images}.values()
    # number of images → rows
    rows_by_images = Counter(row.n_images for row in facts)
    return {
        "in_all": len(images),
        "distinct": len(distinct),
        "per_row": {str(n): rows for n, rows in sorted(rows_by_images.items())},
        "width": _spread([image.width for image in distinct]),
        "height": _spread([image.height for image in distinct]),
        "bytes": _spread([image.bytes for image in distinct]),
    }


def _videos(facts: Sequence[RowFacts]) -> dict[str, Any]:
    """Return the figures of the videos of these rows; sizes are those of the sampled frames."""
    videos = [image for row in facts for image in row.images if image.frames]
    distinct = {video.hash: video for video in videos}.values()
    rows_by_videos = Counter(len(row.images) - row.n_images for row in facts)
    return {
        "in_all": len(videos),
        "distinct": len(distinct),
        "per_row": {str(n): rows for n, rows in sorted(rows_by_videos.items())},
        "frames": _spread([video.frames for video in distinct]),
        "seconds": _spread([round(video.seconds) for video in distinct]),
        "width": _spread([video.width for video in distinct]),
        "height": _spread([video.height for video in distinct]),
        "bytes": _spread([video.bytes for video in distinct]),
    }


def _image_hashes(row: RowFacts) -> tuple[str, ...]:
    """Return the hashes of a row's images in order."""
    return tuple(image.hash for image in row.images)


def _image_tokens(row: RowFacts, budget: int) -> int:
    """Return the tokens of a row's images; `budget` is the index into `ImageFacts.tokens`."""
    return sum(image.tokens[budget] for image in row.images if image.tokens)


def _budgets(
    facts: Sequence[RowFacts], max_prompt_length: int, max_pixels: int | None
) -> dict[str, Any]:
    """Return the rows that other limits would leave out: limits of tokens, of an image's area, of
    images in a row."""
    lengths = np.array([row.tokens for row in facts] or [0])
    shortest, longest = int(lengths.min()), int(lengths.max())
    # shorter limits leave out every row, longer ones none, as the first one above the longest shows
    limits = {n for n in _LENGTHS if shortest <= n < 2 * longest} | {max_prompt_length}
    budgets: dict[str, Any] = {
        "max_prompt_length": [
            {"value": n, "dropped": int((lengths > n).sum())} for n in sorted(limits)
        ]
    }
    text = np.array([row.tokens - _image_tokens(row, 0) for row in facts] or [0])
    areas = [
        (max_pixels, 0),
        *((area, k) for k, area in enumerate(PIXEL_BUDGETS, 1) if area != max_pixels),
    ]
    budgets["image_max_pixels"] = []
    for area, k in areas:
        pictures = [image for row in facts for image in row.images if not image.frames]
        if any(image.tokens and image.tokens[k] >= 0 for image in pictures):
            total = text + np.array([_image_tokens(row, k) for row in facts])
            dropped = int((total > max_prompt_length).sum())
            budget = {"value": None, "prompt": _spread(total.tolist(), bins=0), "dropped": dropped}
            # a value with the figures of an earlier one makes no difference, and is left out
            if all(budget != {**earlier, "value": None} for earlier in budgets["image_max_pixels"]):
                budgets["image_max_pixels"].append(budget | {"value": area})
    most_images = max((len(row.images) for row in facts), default=0)
    counts = np.array([len(row.images) for row in facts] or [0])
    budgets["images_per_row"] = [
        {"value": n, "above": int((counts > n).sum())} for n in (1, 2, 4, 8, 16) if n < most_images
    ]
    return budgets


def _repeated(keys: Iterable[tuple[int, Hashable]]) -> list[list[int]]:
    """Return the rows that have a key in common, each group in order."""
    rows = defaultdict(list)
    for row, key in keys:
        rows[key].append(row)
    return [group for group in rows.values() if len(group) > 1]


def _overlap(train: Split, val: Split) -> dict[str, list[list[int]]]:
    """Return pairs [row of val, row of train] by their common part.

    "rows": text and images; "images": an image, but not the whole row; "texts": the text, but not
    the whole row.
    """

    def first(keys: Iterable[tuple[Hashable, int]]) -> dict[Hashable, int]:
        """Return key → the first row that has it."""
        first_rows: dict[Hashable, int] = {}
        for key, row in keys:
            first_rows.setdefault(key, row)
        return first_rows

    rows = first(((row.text, _image_hashes(row)), row.row) for row in train.facts)
    texts = first((row.text, row.row) for row in train.facts)
    images = first((image.hash, row.row) for row in train.facts for image in row.images)
    overlap: dict[str, list[list[int]]] = {"rows": [], "images": [], "texts": []}
    for row in val.facts:
        if (row.text, _image_hashes(row)) in rows:
            overlap["rows"].append([row.row, rows[row.text, _image_hashes(row)]])
            continue
        shared_image = next((image.hash for image in row.images if image.hash in images), None)
        if shared_image:
            overlap["images"].append([row.row, images[shared_image]])
        if row.text in texts:
            overlap["texts"].append([row.row, texts[row.text]])
    return overlap


def _spread(values: Sequence[int], bins: int = BINS) -> dict[str, Any] | None:
    """Return quantiles, the mean and a histogram; None without values.

    The edges of the histogram grow by a factor where values spread widely.
    """
    if not values:
        return None
    array = np.asarray(values)
    names = {"min": 0, "median": 50, "p95": 95, "p99": 99, "max": 100}
    # "higher": a quantile is the value of a row, and no mean of two
    spread: dict[str, Any] = {
        name: int(np.percentile(array, q, method="higher")) for name, q in names.items()
    }
    spread["mean"] = round(float(array.mean()), 1)
    if bins:
        # one bin per whole number at most, and at least one bin
        low, high = spread["min"], max(spread["max"], spread["min"] + 1)
        is_wide = low > 0 and high > 8 * max(spread["median"], 1)
        edges = (
            np.geomspace(low, high, bins + 1)
            if is_wide
            else np.linspace(low, high, min(bins, high - low) + 1)
        )
        spread["histogram"] = {
            "edges": [round(float(e), 1) for e in edges],
            "counts": np.histogram(array, edges)[0].tolist(),
        }
    return spread


def _refusals(split: Split, figures: Mapping[str, Any], config: Config) -> list[str]:
    """Return the sentences on a split for which training would stop."""
    data = config.data
    rows, bad_rows = figures["rows"], figures["bad"]["rows"]
    key = f"data.{split.name}_data_paths"
    refused = []
    if bad_rows > data.max_bad_rows * rows:
        refused.append(
            f"{key}: {bad_rows} of {rows} rows are bad ({bad_rows / rows:.1%}), more than "
            f"data.max_bad_rows={data.max_bad_rows:g}; repair them, leave them out, or raise it"
        )
    if figures["too_long"] and data.overlong == "error":
        limit = row_limit(config)
        allowed_modes = "drop or cut" if limit.subject == "prompt" else "drop"
        refused.append(
            f"{key}: {len(figures['too_long'])} {limit.subject}s are longer than "
            f"{limit}, and data.overlong is error; raise the first, or set "
            f"the second to {allowed_modes}"
        )
    # a training step draws a batch of different rows; validation takes whatever there is
    needed_rows = data.rollout_batch_size if split.name == "train" else 1
    if figures["usable"] < needed_rows:
        consequence = (
            f"data.rollout_batch_size={needed_rows} needs more"
            if split.name == "train"
            else "nothing could be validated"
        )
        refused.append(f"{key}: of {rows} rows {figures['usable']} can be used; {consequence}")
    return refused


def _warnings(
    figures: Mapping[str, Mapping[str, Any]], overlap: Mapping[str, Sequence[Any]], config: Config
) -> list[str]:
    """Return the sentences on losses and doubles for which training would not stop."""
    warnings = []
    for split, split_figures in figures.items():
        bad_rows = split_figures["bad"]["rows"]
        if bad_rows and bad_rows <= config.data.max_bad_rows * split_figures["rows"]:
            warnings.append(f"{split}: {bad_rows} rows are bad and will be left out")
        if split_figures["too_long"] and config.data.overlong == "drop":
            warnings.append(
                f"{split}: {len(split_figures['too_long'])} rows will be left out, their prompts "
                "are too long"
            )
        if split_figures["cut"]:
            lost = sum(1 for cut in split_figures["cut"] if cut["images_lost"])
            warnings.append(
                f"{split}: {len(split_figures['cut'])} prompts will be cut, {lost} of them lose "
                "images"
            )
        if split_figures["text_only"]:
            warnings.append(
                f"{split}: {len(split_figures['text_only'])} rows have no image, and "
                "data.image_only_mode leaves them out"
            )
        for name, n_rows in split_figures["unused_keys"].items():
            warnings.append(f"{split}: {name!r} of {n_rows} rows is neither used nor passed on")
        if split_figures["images_dropped"]:
            warnings.append(
                f"{split}: {split_figures['images_dropped']} images are beyond "
                "data.max_images_per_message and _per_sample"
            )
        if groups := split_figures["contradictions"]:
            rows = sum(map(len, groups))
            warnings.append(
                f"{split}: {rows} rows ask what another one asks, and have another answer "
                f"({len(groups)} questions)"
            )
        if groups := split_figures["duplicates"]["rows"]:
            warnings.append(
                f"{split}: {sum(len(g) - 1 for g in groups)} rows repeat another one, text and "
                "images"
            )
    for kind, relation in (
        ("rows", "stand in train, text and images"),
        ("images", "show an image of train"),
    ):
        if overlap.get(kind):
            warnings.append(f"val: {len(overlap[kind])} rows {relation}: accuracy will be too high")
    return warnings


def render(figures: Mapping[str, Any]) -> str:
    """Return the page of `check-data` for a terminal."""
    lines = []
    for name, split in figures["splits"].items():
        lines += _render_split(name, split, figures["limits"]["length"])
    if overlap := figures["overlap"]:
        lines.append("overlap of val with train")
        for kind, description in (
            ("rows", "rows of val have the text and the images of one of train"),
            ("images", "others show an image of train"),
            (
                "texts",
                "others have the text of one of train (which means little where the image is "
                "asked about)",
            ),
        ):
            lines.append(f"  {len(overlap[kind]):6}  {description}")
        lines.append("")
    lines += [f"! {problem}" for problem in figures["problems"]] or ["nothing to complain of"]
    if figures["model"] is None:
        lines.append("tokens were not counted: add rollout.model.model_path=MODEL")
    return "\n".join(lines)


def _render_split(name: str, split: Mapping[str, Any], limit: Mapping[str, Any]) -> list[str]:
    """Return the lines on a split; `limit` is that of the figures."""
    bad_rows = split["bad"]
    share = f" ({split['usable'] / split['rows']:.1%})" if split["rows"] else ""
    lines = [
        f"{name}: {split['rows']} rows, {split['usable']} usable{share}",
        f"  of {', '.join(split['paths'])}",
    ]
    for kind, n in bad_rows["by_kind"].items():
        lines.append(f"  {n:6}  {kind}")
        examples = [row for row in bad_rows["all"] if row["kind"] == kind][:EXAMPLES]
        lines += [
            f"          {row['id']}: {shorten(' '.join(row['reason'].split()), EXAMPLE_CHARACTERS)}"
            for row in examples
        ]
    if too_long := split["too_long"]:
        too_long_examples = ", ".join(
            f"{row['id']} ({row['tokens']} tokens)" for row in too_long[:EXAMPLES]
        )
        lines.append(
            f"  {len(too_long):6}  {limit['of']} longer than {limit['value']} tokens: "
            f"{too_long_examples}"
        )
    images = split["images"]
    rows = ", ".join(f"{count} with {n}" for n, count in list(images["per_row"].items())[:8])
    lines += [
        "",
        f"  images      {images['in_all']}, {images['distinct']} distinct; rows: {rows or 'none'}",
    ]
    spreads = {"width": images["width"], "height": images["height"], "bytes": images["bytes"]}
    spreads |= {f"{label} tokens": spread for label, spread in split.get("tokens", {}).items()}
    lines += [f"  {label:14}{_spread_text(spread)}" for label, spread in spreads.items() if spread]
    lines += _video_lines(split["videos"])
    answers = split["answers"]
    common = ", ".join(f"{shorten(answer, 20)} × {n}" for answer, n in answers["most_common"][:4])
    lines.append(f"  answers     {answers['distinct']} distinct; most frequent: {common or 'none'}")
    if budgets := split.get("budgets"):
        drops = ", ".join(f"{b['value']} → {b['dropped']}" for b in budgets["max_prompt_length"])
        lines.append(f"  rows that {limit['key']} would drop: {drops}")
        for budget in budgets["image_max_pixels"] if len(budgets["image_max_pixels"]) > 1 else ():
            prompt = budget["prompt"]
            area = "as it is" if budget["value"] is None else f"{budget['value']}"
            lines.append(
                f"  data.image_max_pixels {area:>8}: {limit['of']}s of {prompt['median']} tokens, "
                f"99 % ≤ {prompt['p99']}, longest {prompt['max']}; {budget['dropped']} above "
                f"{limit['value']}"
            )
        if budgets["images_per_row"]:
            counts = ", ".join(f"{b['value']} → {b['above']}" for b in budgets["images_per_row"])
            lines.append(f"  rows with more images than: {counts}")
    return [*lines, ""]


def _video_lines(videos: Mapping[str, Any]) -> list[str]:
    """Return the lines on the videos of a split; none if it has none."""
    if not videos["in_all"]:
        return []
    rows = ", ".join(f"{count} with {n}" for n, count in list(videos["per_row"].items())[:8])
    lines = [f"  videos      {videos['in_all']}, {videos['distinct']} distinct; rows: {rows}"]
    labels = {
        "frames": "sampled frames",
        "seconds": "last frame's s",
        "width": "frame width",
        "height": "frame height",
        "bytes": "frames' bytes",
    }
    return lines + [f"  {label:15} {_spread_text(videos[key])}" for key, label in labels.items()]


def _spread_text(spread: Mapping[str, Any]) -> str:
    """Return a histogram in bars and the quantiles as one line."""
    if spread["min"] == spread["max"]:
        return f"{spread['min']}, all of them"
    counts = spread["histogram"]["counts"]
    top = max(counts) or 1
    # rounded up, so that a bin with a single row is seen
    bars = "".join(_BARS[-(-n * (len(_BARS) - 1) // top)] if n else " " for n in counts)
    numbers = ", ".join(f"{name} {spread[name]}" for name in ("min", "median", "p95", "p99", "max"))
    return f"|{bars}| {numbers}"
