"""The documentation builds as a site without a warning and loads nothing from the network; its figures of memory and of
layouts are preflight's."""

import contextlib
import io
import re
import runpy
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

from rlinf_vl.config.load import parse_config
from rlinf_vl.tools.memory.gpu_parts import GIB
from rlinf_vl.tools.memory.ledger import Hardware, Ledger, ledger
from rlinf_vl.tools.memory.model import Model

ROOT = Path(__file__).resolve().parents[2]
DOCS = ROOT / "docs"
LOADED = re.compile(
    r"<(?:script|link|img|iframe)\b[^>]*\b(?:src|href)=\"?((?:https?:)?//[^\"\s>]+)"
)


#: Differences that other versions of torch and transformers may make, in GiB and in responses.
GIB_TOLERANCE, RESPONSES_TOLERANCE = 0.3, 2
#: Config and overrides that all rows of docs/one-small-gpu.md share.
SMALL_GPU_CONFIG = "qwen3-vl-2b-grpo-lora-geo3k"
SMALL_GPU_OVERRIDES = ("runner.max_tokens_per_mbs=8192",)


def phase_gib(counted: Ledger, phase: str) -> float:
    """Return the GiB that a phase takes of the one GPU."""
    (gpu,) = counted.gpus
    return sum(gpu.phases[phase].values()) / GIB


def small_gpu_problems() -> Iterator[str]:
    """Yield the rows of docs/one-small-gpu.md that preflight counts otherwise."""
    text = (DOCS / "one-small-gpu.md").read_text(encoding="utf-8")
    row_pattern = r"^\| (.+) \| (yes|no) \| ([\d.]+) \| ([\d.]+) \| (\d+) \|$"
    rows = re.findall(row_pattern, text, re.M)
    if not rows:
        yield "one-small-gpu.md has no table of what fits"
    models: dict[
        str, Model
    ] = {}  # shared by configs that differ in the engine: a trace takes seconds
    for title, fits, train, sync, responses in rows:
        overrides = re.findall(r"`([\w.]+=[^`]+)`", title)
        config = parse_config(SMALL_GPU_CONFIG, [*SMALL_GPU_OVERRIDES, *overrides])
        model = models.setdefault(str(config.actor.model), Model(config))
        counted = ledger(config, Hardware.named(1, 24), model)
        train_gib, sync_gib = phase_gib(counted, "train"), phase_gib(counted, "sync")
        at_once = counted.kv_tokens // config.runner.seq_length
        as_counted = (
            (fits == "yes") == (not counted.problems)
            and abs(train_gib - float(train)) <= GIB_TOLERANCE
            and abs(sync_gib - float(sync)) <= GIB_TOLERANCE
            and abs(at_once - int(responses)) <= RESPONSES_TOLERANCE
        )
        if not as_counted:
            figures = f"train {train_gib:.1f}, sync {sync_gib:.1f}, {at_once} at once"
            yield f"one-small-gpu.md, {title}: preflight counts {figures}; {counted.problems}"
    config = parse_config(
        SMALL_GPU_CONFIG, [*SMALL_GPU_OVERRIDES, "actor.model.lora.quantization=nf4"]
    )
    counted = ledger(config, Hardware.named(1, 16), models[str(config.actor.model)])
    usable_gib = counted.hardware.usable / GIB
    claim = f"the sync of QLoRA needs {phase_gib(counted, 'sync'):.1f} of {usable_gib:.1f} GiB"
    if claim not in " ".join(text.split()):
        yield f"one-small-gpu.md, 16 GB: preflight says {claim}"


def stale_pages() -> Iterator[str]:
    """Yield the pages of memory and layouts that preflight would write otherwise."""
    for page, program in (("memory", "generate_memory_page"), ("cost", "generate_layouts")):
        generator = runpy.run_path(str(DOCS / f"{program}.py"))
        with contextlib.redirect_stderr(io.StringIO()):  # the progress of a search
            text = generator["render_page"]()
        if text != (DOCS / f"{page}.md").read_text(encoding="utf-8"):
            yield f"docs/{page}.md is not what preflight says: run python docs/{program}.py"


def main() -> str | None:
    with tempfile.TemporaryDirectory() as folder:
        site = Path(folder)
        # A page outside the navigation, or a link or anchor that leads nowhere, is an error.
        command = [
            sys.executable,
            "-m",
            "mkdocs",
            "build",
            "--strict",
            "--config-file",
            "mkdocs.yml",
            "--site-dir",
        ]
        done = subprocess.run([*command, folder], cwd=ROOT, capture_output=True, text=True)
        if done.returncode:
            return done.stderr
        problems = [
            f"the site has no page {p.stem}"
            for p in DOCS.glob("*.md")
            if not (site / f"{p.stem}.html").exists()
        ]
        pictures = {p.name for p in (site / "images").iterdir()} ^ {
            p.name for p in (DOCS / "images").iterdir()
        }
        problems += [f"the site and docs/images differ in {name}" for name in sorted(pictures)]
        problems += [f"the site has a program: {path.name}" for path in site.rglob("*.py")]
        pages = {page.name: page.read_text() for page in site.glob("*.html")}
    problems += [
        f"{name} loads {url}" for name, text in pages.items() for url in LOADED.findall(text)
    ]
    # Links out of the documentation become the file's name.
    architecture = pages["architecture.html"]
    if "<code>controller/loop.py</code>" not in architecture or 'href="../' in architecture:
        problems.append("architecture.html links out of the site")
    problems += stale_pages()
    problems += small_gpu_problems()
    if not problems:
        print(
            f"a site of {len(pages)} pages without a warning; figures of memory and layouts are up to date"
        )
    return "\n".join(problems) or None


if __name__ == "__main__":
    sys.exit(main())
