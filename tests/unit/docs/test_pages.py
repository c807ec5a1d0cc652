"""What the pages say can be followed: links lead somewhere, examples run, commands are taken, names exist."""

import argparse
import ast
import importlib.util
import json
import re
import shlex
import tomllib
from collections.abc import Iterator
from functools import cache
from importlib import metadata
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import yaml
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from rlinf_vl.__main__ import main
from rlinf_vl.cli.parser import parse
from rlinf_vl.config import config_keys, load_config
from rlinf_vl.config.keys import config_sections
from rlinf_vl.engines.sglang.machine import CUDA_MAJOR
from rlinf_vl.models.families import FAMILIES
from rlinf_vl.observe.trajectories import SCHEMA
from rlinf_vl.rewards.named import NAMED
from rlinf_vl.tools.sweep.plan import check_sweep, plan_sweep

ROOT = Path(__file__).resolve().parents[3]
KERNEL_NOTES = ROOT / "rlinf_vl/models/kernels/README.md"
PAGES = [
    ROOT / "README.md", ROOT / "CONTRIBUTING.md", KERNEL_NOTES, *sorted((ROOT / "docs").glob("*.md")),
]  # fmt: skip
FENCE = re.compile(r"^```(\w*)\n(.*?)^```", re.M | re.S)
RUN = "examples/reasoning/run_main_grpo_vqa.sh"

#: Who runs the commands that these tests only read: a pattern, and files of tests (or why there are none).
RUN_BY = {
    r'(eval "\$\()?rlinf-vl ': "tests/unit/cli/test_cli.py",
    r"bash tests/run\.sh": "tests/unit/scripts/test_scripts.py",
    r"(TORCH_INDEX_URL=\S+ )?bash requirements/install\.sh": "tests/unit/scripts/test_scripts.py",
    r"bash ray_utils/\w+\.sh": "tests/unit/scripts/test_ray_utils.py tests/e2e/test_cluster.py",
    r"(sbatch|sky( jobs)? launch) .*examples/launchers/": "tests/unit/scripts/test_launchers.py tests/e2e/test_launchers.py",
    r"\S*python benchmarks/\w+\.py": "tests/integration/test_benchmarks.py",
    r"RLINF_VL_FIGURES=\S+ \S*python -m pytest": "tests/integration/test_models.py tests/integration/sglang/test_families.py",
    r"\S*python docs/generate_models_page\.py": "tests/unit/docs/test_config_page.py",
    r"\S*python -m pip install": "none: it fetches what is not in the environment",
    r"\S*jupyter lab": "none: it is a server",
    r"\S*tensorboard --logdir": "none: it is a server",
    r"\S*trackio show": "none: it is a server",
    r"\S*wandb (login|sync)": "none: it needs an account",
    r"\S*ruff (check|format)": "none: it is a check itself",
    r"\S*basedpyright": "tests/checks/type_hints.py",
    r"bash tests/checks\.sh": "none: it is a check itself",
}


def name_of(page: Path) -> str:
    return str(page.relative_to(ROOT))


def fences(page: Path, language: str) -> list[str]:
    return [
        body
        for tongue, body in FENCE.findall(page.read_text(encoding="utf-8"))
        if tongue == language
    ]


def prose(page: Path) -> str:
    """A page without its fenced blocks."""
    return FENCE.sub("", page.read_text(encoding="utf-8"))


def inline_code(page: Path) -> list[str]:
    spans = (
        span for block in prose(page).split("\n\n") for span in re.findall(r"`([^`]+)`", block)
    )
    return [" ".join(span.split()) for span in spans]


def commands(page: Path) -> list[str]:
    """What its bash blocks run, one command each, and the runs that are named in its text."""
    lines = "\n".join(fences(page, "bash")).replace("\\\n", " ").splitlines()
    parts = [part.strip() for line in lines for part in line.split("&&")]
    ran = [
        part
        for part in parts
        if shlex.split(part, comments=True) and not part.startswith("export ")
    ]
    return ran + [code for code in inline_code(page) if code.startswith(f"bash {RUN}")]


ALL_COMMANDS = [(page, command) for page in PAGES for command in commands(page)]
EXAMPLES = [
    pytest.param(body, id=f"{name_of(page)}-{i}")
    for page in PAGES
    for i, body in enumerate(fences(page, "python"))
]


# --- links ------------------------------------------------------------------------------------------------------------


def anchors(page: Path) -> set[str]:
    """Those that GitHub makes of headings, and those that are written out."""
    text = prose(page)
    headings = (
        re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", h) for h in re.findall(r"^#+ (.+)$", text, re.M)
    )
    slugs = {
        re.sub(r"[^\w\- ]", "", heading.lower()).strip().replace(" ", "-") for heading in headings
    }
    return slugs | set(re.findall(r'<a id="([^"]+)">', text))


def broken_links(page: Path) -> Iterator[str]:
    for target in re.findall(r"\]\(([^)\s]+)\)", prose(page)):
        if re.match(r"[a-z]+:", target):
            continue
        path, _, anchor = target.partition("#")
        there = (page.parent / path).resolve() if path else page
        if (
            not there.exists()
            or not there.is_relative_to(ROOT)
            or anchor
            and anchor not in anchors(there)
        ):
            yield target


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_links_lead_somewhere(page: Path):
    assert not list(broken_links(page))


# --- navigation -------------------------------------------------------------------------------------------------------


def nav_pages(entries: list[Any]) -> Iterator[str]:
    """Yield the pages of mkdocs' navigation, in order; an entry is {title: page} or {title: entries}."""
    for entry in entries:
        for value in entry.values():
            if isinstance(value, str):
                yield value
            else:
                yield from nav_pages(value)


def test_every_page_is_once_in_the_navigation():
    """mkdocs itself takes a page that is listed twice."""
    nav = yaml.safe_load((ROOT / "mkdocs.yml").read_text(encoding="utf-8"))["nav"]
    assert sorted(nav_pages(nav)) == sorted(path.name for path in (ROOT / "docs").glob("*.md"))


def test_the_guide_stays_short():
    """The guide is all of the navigation but its last part, which is folded."""
    *guide, folded = yaml.safe_load((ROOT / "mkdocs.yml").read_text(encoding="utf-8"))["nav"]
    assert list(folded) == ["Internals and measurements"]
    pages = list(nav_pages(guide))
    words = sum(len((ROOT / "docs" / page).read_text(encoding="utf-8").split()) for page in pages)
    assert len(pages) <= 30 and words <= 30_000, (len(pages), words)


def test_the_list_of_tasks_leads_to_every_page():
    index = (ROOT / "docs/index.md").read_text(encoding="utf-8")
    linked = set(re.findall(r"\]\(([\w-]+\.md)", index))
    pages = {path.name for path in (ROOT / "docs").glob("*.md")} - {"index.md"}
    assert not pages - linked


# --- examples ---------------------------------------------------------------------------------------------------------


@pytest.fixture
def registries():
    """As they were, afterwards."""
    saved = [(registry, dict(registry)) for registry in (NAMED, FAMILIES)]
    yield
    for registry, content in saved:
        registry.clear()
        registry.update(content)


@pytest.fixture
def working_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where a reader might stand: with data, and a run that has recorded trajectories."""
    (tmp_path / "data").mkdir()
    for name in ("train", "test"):
        (tmp_path / f"data/{name}.parquet").touch()
    recorded = tmp_path / "results/toy-grpo-cpu/trajectories"
    recorded.mkdir(parents=True)
    turns = {
        "sequences": [0],
        "turns": [{"start": 0, "end": 2, "finish_reason": "stop", "reward": 1.0}],
    }
    said = [
        [{"role": "user", "content": [0, "?"]}, {"role": "assistant", "content": [], "turn": 0}]
    ]
    row = {"step": 1, "split": "val", "correct": False, "tokens": ["a", "b"]}
    row |= {"turns": json.dumps(turns), "messages": json.dumps(said)}
    table = pa.table(
        {field.name: pa.array([row.get(field.name)], field.type) for field in SCHEMA}, schema=SCHEMA
    )
    pq.write_table(table, recorded / "step_1.parquet")
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.mark.parametrize("example", EXAMPLES)
def test_python_examples_run(example: str, working_folder: Path, registries: None):
    exec(compile(example, "example", "exec"), {"__name__": "example"})


def test_there_is_an_example_of_every_extension():
    pages = [ROOT / f"docs/{name}.md" for name in ("extending", "extending-engines")]
    text = "\n".join(body for page in pages for body in fences(page, "python"))
    for mark in (
        "class Brief",
        "NAMED[",
        "def median_baseline",
        "EngineDied",
        "FAMILIES[",
        "Trackers(",
    ):
        assert mark in text


# --- commands ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("page", "command"), ALL_COMMANDS, ids=lambda value: getattr(value, "name", value)
)
def test_commands_are_taken(
    page: Path, command: str, working_folder: Path, monkeypatch: pytest.MonkeyPatch
):
    """Runs by their config, with every override; verbs by their parser; for the others a test is named."""
    # SGLang, where an example wants it.
    monkeypatch.setattr(importlib.util, "find_spec", lambda package: object())
    without_variables = re.sub(r"^([A-Z_]+=\S+ )+", "", command)
    words = shlex.split(without_variables, comments=True)
    if words[:2] == ["bash", RUN]:
        config, overrides = words[2], words[3:]
        load_config(config, overrides)
    elif "-m rlinf_vl " in command:
        verb, *arguments = words[words.index("rlinf_vl") + 1 :]
        taken = parsed([verb, *arguments], monkeypatch)
        if verb == "train":
            load_config(taken.config, taken.overrides)
    else:
        who = [by for pattern, by in RUN_BY.items() if re.match(pattern, command)]
        assert who, f"{name_of(page)}: who runs {command!r}? add it to RUN_BY"
        assert who[0].startswith("none: ") or all(
            (ROOT / test).is_file() for test in who[0].split()
        )


def test_the_list_of_who_runs_what_is_not_stale():
    for pattern in RUN_BY:
        assert any(re.match(pattern, command) for _, command in ALL_COMMANDS), pattern


class _Parsed(Exception):
    pass


def parsed(arguments: list[str], monkeypatch: pytest.MonkeyPatch) -> argparse.Namespace:
    """What the command line makes of them, without running it."""
    parse = argparse.ArgumentParser.parse_known_args

    def stop(parser, argv=None, namespace=None):
        known, rest = parse(parser, argv, namespace)
        if "verb" not in known:  # a verb's own parser, called by the one of all
            return known, rest
        assert not rest, f"not taken: {rest}"
        raise _Parsed(known)

    with monkeypatch.context() as patch, pytest.raises(_Parsed) as found:
        patch.setattr(argparse.ArgumentParser, "parse_known_args", stop)
        main(arguments)
    return found.value.args[0]


def test_every_verb_that_is_named_exists(capsys: pytest.CaptureFixture[str]):
    verbs = {
        verb
        for page in PAGES
        for verb in re.findall(
            r"(?m)(?:^|`)rlinf-vl ([a-z][\w-]*)", page.read_text(encoding="utf-8")
        )
    }
    assert {"toy", "export", "report"} <= verbs
    for verb in verbs:
        with pytest.raises(SystemExit) as end:
            main([verb, "--help"])
        assert end.value.code == 0, verb


def test_the_quick_start_has_the_readmes_commands():
    assert set(commands(ROOT / "docs/index.md")) <= set(commands(ROOT / "README.md"))


@pytest.mark.slow
def test_the_sweep_starts_runs_that_load(tmp_path: Path):
    """The command of docs/tuning.md: every one of its runs has a config and a folder of its own."""
    text = next(body for body in fences(ROOT / "docs/tuning.md", "bash") if "--multirun" in body)
    _, *words = shlex.split(text.replace("\\\n", " ").splitlines()[0])
    arguments = parse(words)
    assert arguments.verb == "train" and arguments.multirun
    sweep = plan_sweep(arguments.config, [*arguments.overrides, f"runner.output_dir={tmp_path}"])
    check_sweep(sweep, ())
    assert len({run.name for run in sweep.runs}) == 12
    seeds = [load_config(sweep.config, sweep.overrides(run)).data.seed for run in sweep.runs]
    assert sorted(set(seeds)) == [1, 2, 3]


@pytest.mark.parametrize("page", [page for page in PAGES if fences(page, "yaml")], ids=name_of)
def test_yaml_examples_load(page: Path, tmp_path: Path):
    for body in fences(page, "yaml"):
        path = tmp_path / "mine.yaml"
        path.write_text(f"defaults: [toy-grpo-cpu, _self_]\n{body}")
        load_config(str(path))


# --- names ------------------------------------------------------------------------------------------------------------


THEIRS = "coming-from.md"  # names other systems' keys; its generator links ours


@pytest.mark.parametrize("page", [page for page in PAGES if page.name != THEIRS], ids=name_of)
def test_config_keys_that_are_named_exist(page: Path):
    tops = "|".join(name for name in config_sections() if "." not in name)
    named = (
        re.match(rf"((?:{tops})(?:\.[a-z0-9_]+)+)(?=[=: ]|$)", code) for code in inline_code(page)
    )
    keys = {match[1] for match in named if match}
    assert not keys - config_keys().keys() - config_sections().keys()


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_files_that_are_named_exist(page: Path):
    tops = "rlinf_vl|tests|benchmarks|docs|examples|ray_utils|requirements"
    paths = {code for code in inline_code(page) if re.fullmatch(rf"(?:{tops})/[\w./-]+", code)}
    made = {"rlinf_vl/envs/brief.py"}  # of an example
    assert not [path for path in paths - made if not (ROOT / path).exists()]


def test_images_have_the_cuda_of_sglangs_kernels():
    """An image that a page or a launcher builds on is CUDA's of that version, or `docker/Dockerfile.cuda`'s."""
    launchers = [*(ROOT / "docker").iterdir(), *(ROOT / "examples").rglob("*.yaml")]
    bases = []
    for file in [*PAGES, *launchers]:
        text = file.read_text(encoding="utf-8")
        bases += re.findall(r"^ *FROM (\S+)", text, re.M) + re.findall(r"nvidia/cuda:[\w.-]+", text)
    assert {re.sub(r"(cuda:\d+)\..*", r"\1", base) for base in bases} == {
        f"nvidia/cuda:{CUDA_MAJOR}",
        "rlinf_vl",
    }


def test_every_symptom_has_its_parts():
    sections = re.split(r"^### ", prose(ROOT / "docs/troubleshooting.md"), flags=re.M)[1:]
    assert len(sections) >= 33
    for section in sections:
        entry = section.split("\n## ")[0]
        parts = re.findall(r"^- \*\*([A-Z][a-z ]+):\*\*", entry, re.M)
        assert parts[:3] == ["Shows as", "Cause", "Way out"], entry
        assert parts[3:] in ([], ["Here"]), entry


@pytest.mark.slow
def test_messages_that_are_quoted_are_printed():
    texts = []
    for path in [*(ROOT / "rlinf_vl").rglob("*.py"), *(ROOT / "ray_utils").glob("*.py")]:
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.JoinedStr):
                texts.append(
                    "".join(v.value if isinstance(v, ast.Constant) else "\0" for v in node.values)
                )
            elif isinstance(node, ast.Constant) and isinstance(node.value, str):
                texts.append(node.value)
    quoted = re.findall(r"“([^”]+)”", prose(ROOT / "docs/troubleshooting.md"))
    assert quoted
    for message in quoted:
        pattern = ".*".join(map(re.escape, re.split(r"\s*…\s*", " ".join(message.split()))))
        assert any(re.search(pattern, text, re.S) for text in texts), message


# --- tools that commands use ------------------------------------------------------------------------------------------

#: Options of install.sh and extras of pip, by which a page adds packages to the environment before it uses them.
ADDED_BY = re.compile(
    r"install\.sh [^\n`]*--(dev)\b|pip install -e '\.\[(\w+)\]'|bash tests/run\.sh +# [^\n]*makes the environment"
)
#: Programs of Python itself.
OF_PYTHON = {"python", "pip", "venv", "activate"}


def requirement_names(lines: list[str]) -> set[str]:
    return {
        canonicalize_name(Requirement(line.partition("#")[0]).name)
        for line in lines
        if line.partition("#")[0].strip()
    }


def with_dependencies(names: set[str]) -> set[str]:
    """These distributions and all that they need, as far as they are installed here."""
    known, pending = set(), [*names]
    while pending:
        name = pending.pop()
        if name in known:
            continue
        try:
            needed = [Requirement(line) for line in metadata.distribution(name).requires or ()]
        except metadata.PackageNotFoundError:
            continue
        known.add(name)
        pending += [
            canonicalize_name(one.name)
            for one in needed
            if one.marker is None or one.marker.evaluate({"extra": ""})
        ]
    return known


@cache
def modules_by_distribution():
    return metadata.packages_distributions()


def programs_of(distributions: set[str]) -> set[str]:
    """What can be run of them: console scripts, and modules for `python -m`."""
    scripts = {
        entry.name for name in distributions for entry in metadata.distribution(name).entry_points
    }
    modules = modules_by_distribution().items()
    return scripts | {
        module
        for module, owners in modules
        if distributions & {canonicalize_name(one) for one in owners}
    }


def programs_used(page: Path) -> set[str]:
    text = page.read_text(encoding="utf-8")
    return set(re.findall(r"\.venv/bin/(?:python -m )?([\w-]+)", text)) | set(
        re.findall(r"\bpython -m ([\w-]+)", text)
    )


@pytest.mark.slow
def test_every_tool_of_a_command_is_in_the_environment_that_the_page_makes():
    base = requirement_names((ROOT / "requirements/base.txt").read_text().splitlines()) | {
        "rlinf-vl"
    }
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"][
        "optional-dependencies"
    ]
    by_default = programs_of(with_dependencies(base)) | OF_PYTHON
    used_beyond = {}
    for page in PAGES:
        steps = list(ADDED_BY.finditer(page.read_text(encoding="utf-8")))
        added = {step[1] or step[2] or "dev" for step in steps}  # tests/run.sh installs with --dev
        names = {name for extra in added for name in requirement_names(extras[extra])}
        # A package that is not installed where the tests run brings the program of its name.
        there = by_default | programs_of(with_dependencies(base | names)) | names
        there |= {"jupyter" for name in names if "jupyter" in name}
        if lacking := programs_used(page) - there:
            used_beyond[name_of(page)] = lacking
    assert not used_beyond, "say how to install them, or install them"
    assert "mkdocs" in programs_used(ROOT / "README.md") and "mkdocs" not in by_default, (
        "nothing was looked for"
    )
