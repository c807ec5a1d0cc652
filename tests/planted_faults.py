"""Plants faults in a copy of the repository, and reports which tests find them.

There is a fault for each promise of docs/architecture.md and docs/reliability.md: a small edit of
the source, and the test files that keep the promise. A fault is found when one of these tests
fails. Its quick tests run first, and the slow ones if they find nothing.

    python tests/planted_faults.py                  # all faults
    python tests/planted_faults.py token-budget …   # some
    python tests/planted_faults.py --list

An edit names no file: its old text stands exactly once in the package, wherever code has moved. An
edit that no longer applies is an error that names it (tests/unit/package/test_planted_faults.py).
Its text is then mended here, or replaced by another edit that breaks the same promise.
"""

import argparse
import importlib
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
PACKAGE = "rlinf_vl"
#: Libraries whose imports take seconds.
LIBRARIES = ("torch", "transformers", "datasets", "pandas", "hypothesis", "ray")
#: Time limit of one fault's test files, in seconds: a fault may make a test hang.
TIMEOUT_S = 900
#: Exit status of pytest when tests have failed; other failures are of pytest or of the edit.
TESTS_FAILED = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Fault:
    """An edit that breaks one promise.

    Attributes:
        page: the page that makes the promise, `architecture` or `reliability`.
        old: a text that stands exactly once in the package.
        new: the text that replaces it.
        tests: the test files that keep the promise.
    """

    name: str
    page: str
    promise: str
    old: str
    new: str
    tests: tuple[str, ...]


FAULTS = (
    # --- docs/architecture.md ---------------------------------------------------------------------
    Fault(
        name="controller-gets-pixels",
        page="architecture",
        promise="The controller never touches a pixel or a token.",
        old="turn_states=trajectory.turn_states,",
        new="turn_states=(*trajectory.turn_states, trajectory.sequences),",
        tests=("tests/integration/test_controller_receives.py",),
    ),
    Fault(
        name="image-stored-twice",
        page="architecture",
        promise="An image exists once, however many groups show it.",
        old="                and image.hash not in self._images\n",
        new="",
        tests=("tests/unit/transport/test_group_store.py",),
    ),
    Fault(
        name="ids-encoded-again",
        page="architecture",
        promise="What follows in a conversation extends the sampled ids.",
        old="if has_ended and ids[-1] == new_ids[0]:",
        new="if False:",
        tests=("tests/unit/rollout/test_renderer.py",),
    ),
    Fault(
        name="placeholders-unmerged",
        page="architecture",
        promise="The number of image placeholders equals what the grids make (t·h·w / merge²).",
        old="return grids.prod(axis=1) * self.tokens_per_tile // self.merge_size**2",
        new="return grids.prod(axis=1) * self.tokens_per_tile // self.merge_size",
        tests=("tests/unit/models/test_processing.py",),
    ),
    Fault(
        name="vision-ids-sampled",
        page="architecture",
        promise="Vision placeholders, padding and unused ids cannot be sampled.",
        old="never = {self.tokenizer.pad_token_id, *map(vocabulary.get, self.family.special_tokens)}",
        new="never = {self.tokenizer.pad_token_id}",
        tests=("tests/unit/models/test_processing.py",),
    ),
    Fault(
        name="softmax-over-banned-ids",
        page="architecture",
        promise="The trainer's softmax leaves the same ids out.",
        old="return logits if banned is None else logits.index_fill_(1, banned, -torch.inf)",
        new="return logits",
        tests=("tests/unit/models/test_logprobs.py",),
    ),
    Fault(
        name="version-of-request",
        page="architecture",
        promise="Every token knows the weights that sampled it.",
        old="row.versions.append(version)",
        new="row.versions.append(row.versions[0] if row.versions else version)",
        tests=("tests/unit/engines/test_weights_in_flight.py",),
    ),
    Fault(
        name="temperature-the-wrong-way",
        page="architecture",
        promise="A logprob is that of the distribution sampled from, temperature included.",
        old="logits.div_(torch.where(self.greedy, 1.0, self.temperature)[:, None])",
        new="logits.mul_(torch.where(self.greedy, 1.0, self.temperature)[:, None])",
        tests=("tests/unit/engines/test_sampling.py", "tests/unit/engines/test_torch_engine.py"),
    ),
    Fault(
        name="algorithms-import-ours",
        page="architecture",
        promise="algorithms/ imports torch and nothing of ours; arrows go one way.",
        old='AGGREGATION_MODES = ("token-mean"',
        new='import rlinf_vl.errors  # noqa\n\nAGGREGATION_MODES = ("token-mean"',
        tests=("tests/unit/package/test_imports.py",),
    ),
    Fault(
        name="column-of-other-tokens",
        page="architecture",
        promise="A per-token column of the engine arrives in the trainer.",
        old="columns=_columns([(p.sequence, t) for _, p, t in sampled]),",
        new="columns=_columns([(p.sequence, t - 1) for _, p, t in sampled]),",
        tests=("tests/unit/packing/test_collator.py",),
    ),
    Fault(
        name="mean-of-means",
        page="architecture",
        promise="The loss does not depend on packing: denominators are global counts.",
        old="divisor = count if denominator is None else denominator",
        new="divisor = count",
        tests=(
            "tests/unit/algorithms/test_aggregation.py",
            "tests/integration/test_update_invariance.py",
        ),
    ),
    Fault(
        name="gradient-of-one-rank",
        page="architecture",
        promise="The gradient does not depend on how many ranks there are.",
        old="(loss * self.mesh.size).backward()",
        new="loss.backward()",
        tests=("tests/integration/test_update_invariance.py",),
    ),
    Fault(
        name="prefix-merged-wrong",
        page="architecture",
        promise="Attention over a shared prompt, merged by log-sum-exps, is the exact softmax.",
        old="lse[rows] = torch.logaddexp(old_lse, added_lse)",
        new="lse[rows] = torch.maximum(old_lse, added_lse)",
        tests=("tests/unit/models/test_attention.py",),
    ),
    Fault(
        name="prefix-gradient-lost",
        page="architecture",
        promise="Each part's backward is exact for its own keys.",
        old="grad_sum[tokens] += part_grad",
        new="grad_sum[tokens] = part_grad",
        tests=("tests/unit/models/test_attention.py",),
    ),
    Fault(
        name="vision-of-one-rank",
        page="architecture",
        promise="Every rank makes the same calls in every micro-step, so no collective waits.",
        old="any(item.patches for rank in per_rank for item in rank[step])",
        new="any(item.patches for item in per_rank[0][step])",
        tests=("tests/unit/packing/test_planner.py",),
    ),
    Fault(
        name="token-budget",
        page="architecture",
        promise="A micro-batch never exceeds its token budget.",
        old="needed = once_tokens[group[first]] + tokens[end] - tokens[first]",
        new="needed = tokens[end] - tokens[first]",
        tests=("tests/unit/packing/test_planner.py",),
    ),
    Fault(
        name="stream-without-step",
        page="architecture",
        promise="A sample's random stream depends on seed, step, row and sample.",
        old="stream_seed(seed, split, stream_step, k, row, i) for i in range(samples)",
        new="stream_seed(seed, split, k, row, i) for i in range(samples)",
        tests=("tests/unit/controller/test_loop.py",),
    ),
    Fault(
        name="positions-behind-images",
        page="architecture",
        promise="M-RoPE positions are computed for each whole sequence from its image grids.",
        old="out[1:, end:] += position + max(steps, h, w) - out[1, end : end + 1]",
        new="out[1:, end:] += position + max(steps, h) - out[1, end : end + 1]",
        tests=("tests/unit/models/test_image_tokens.py",),
    ),
    Fault(
        name="features-of-this-step-dropped",
        page="architecture",
        promise="Features of a frozen tower are computed once a step and kept by content hash.",
        old="if oldest in self._pinned:",
        new="if False:",
        tests=("tests/unit/models/test_vision_cache.py",),
    ),
    Fault(
        name="pass-that-gives-nothing-new",
        page="architecture",
        promise="The first optimizer step's old logprobs are its own forward's.",
        old="auto = 0 if self.actor.model.is_lora and self.actor.model.lora.dropout else 1",
        new="auto = 0",
        tests=("tests/unit/actor/test_old_policies.py",),
    ),
    Fault(
        name="logits-of-all-positions",
        page="architecture",
        promise="No tensor of all positions by the whole vocabulary ever exists.",
        old='CHUNK_BYTES = {"cpu": 2**24',
        new='CHUNK_BYTES = {"cpu": 2**44',
        tests=("tests/unit/models/test_head_memory.py",),
    ),
    Fault(
        name="session-of-another-image",
        page="architecture",
        promise="A session's keys are used for exactly the tokens and images that they are of.",
        old="(i for i, (image, cached_hash) in enumerate(pairs) if image.hash != cached_hash), None",
        new="(i for i, (image, cached_hash) in enumerate(pairs) if image is None), None",
        tests=("tests/unit/engines/test_prefix_cache.py",),
    ),
    Fault(
        name="keys-of-old-weights",
        page="architecture",
        promise="With kv_after_update=recompute, logprobs are those of each token's weights.",
        old="self._cache_outdated = True",
        new="self._cache_outdated = False",
        tests=("tests/unit/engines/test_weights_in_flight.py",),
    ),
    Fault(
        name="routes-not-replayed",
        page="architecture",
        promise="With routing_replay the trainer's policy takes the experts of the engine.",
        old="experts = torch.where(is_reported[:, None], engine_choice, router_choice)",
        new="experts = router_choice",
        tests=("tests/unit/models/test_mixture.py", "tests/unit/actor/test_routing_replay.py"),
    ),
    Fault(
        name="fingerprint-not-compared",
        page="architecture",
        promise="The first sync's fingerprint must be that of what arrives.",
        old="if self.fingerprint not in (None, actual):",
        new="if False:",
        tests=("tests/unit/weights/test_fingerprint.py", "tests/integration/test_weight_sync.py"),
    ),
    # --- docs/reliability.md ----------------------------------------------------------------------
    Fault(
        name="groups-not-sent-again",
        page="reliability",
        promise="All groups of a dead worker are sent again.",
        old="submission.arrived -= resent",
        new="pass",
        tests=("tests/unit/rollout/test_supervisor.py",),
    ),
    Fault(
        name="wedged-engine-alive",
        page="reliability",
        promise="An engine without progress counts as hung.",
        old="wedged = idle_s > timeout_s and (self._stepping or self._may_step())",
        new="wedged = False",
        tests=("tests/unit/engines/test_torch_engine.py",),
    ),
    Fault(
        name="endless-restarts",
        page="reliability",
        promise="Ranks start again at most runner.max_restarts times from one checkpoint.",
        old="restarts[checkpoint] += 1",
        new="restarts[checkpoint] = 0",
        tests=("tests/unit/controller/test_supervise.py",),
    ),
    Fault(
        name="terminal-signals-ray",
        page="reliability",
        promise="Ray's processes have sessions of their own, so that only the run hears Ctrl-C.",
        old="partial(popen, start_new_session=True)",
        new="partial(popen)",
        tests=("tests/e2e/test_recovery.py",),
    ),
    Fault(
        name="grace-period-unwatched",
        page="reliability",
        promise="The run ends before runner.grace_period is over.",
        old="self._end.start()",
        new="pass",
        tests=("tests/unit/runtime/test_stop_request.py",),
    ),
    Fault(
        name="checkpoint-in-place",
        page="reliability",
        promise="Whatever is killed while a checkpoint is written, the one before is whole.",
        old="        if path.is_dir():  # rename can't replace a folder that has files",
        new="        if path.is_dir():\n            shutil.rmtree(path)\n        if path.is_dir():",
        tests=("tests/unit/runtime/test_run_folder.py",),
    ),
    Fault(
        name="step-saved-again-lost",
        page="reliability",
        promise="An older checkpoint of a step gets its name back after a crash.",
        old="os.rename(replaced, path)",
        new="pass",
        tests=("tests/unit/runtime/test_run_folder.py",),
    ),
    Fault(
        name="two-runs-in-a-folder",
        page="reliability",
        promise="A second run in a folder that is in use is refused.",
        old="fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)",
        new="fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)",
        tests=("tests/unit/runtime/test_run_start.py",),
    ),
    Fault(
        name="newer-branch-mixed-in",
        page="reliability",
        promise="Checkpoints newer than the one resumed from are kept in abandoned-N/.",
        old="for checkpoint_step, folder in checkpoints(home) if checkpoint_step > step]",
        new="for checkpoint_step, folder in checkpoints(home) if checkpoint_step > step + 9**9]",
        tests=("tests/unit/runtime/test_run_start.py",),
    ),
    Fault(
        name="schedule-begins-anew",
        page="reliability",
        promise="The learning rate's schedule goes on from the step of the checkpoint.",
        old="self.scheduler = self._schedule(done=step)",
        new="self.scheduler = self._schedule(done=0)",
        tests=("tests/unit/actor/test_checkpoint.py",),
    ),
    Fault(
        name="row-never-alone",
        page="reliability",
        promise="A row that kills workers is answered alone, then quarantined.",
        old="return self._deaths[task.split, task.row] == self._max_deaths - 1",
        new="return False",
        tests=("tests/unit/rollout/test_supervisor.py",),
    ),
    Fault(
        name="lines-of-a-full-disk-lost",
        page="reliability",
        promise="Lines that a full disk refuses are kept and written when they fit.",
        old="self._unwritten_lines += lines",
        new="self._unwritten_lines = lines",
        tests=("tests/unit/runtime/test_files.py",),
    ),
    Fault(
        name="full-disk-ends-the-run",
        page="reliability",
        promise="Training goes on when a checkpoint does not fit the disk.",
        old='self._log.event("checkpoint_failed", str(error))',
        new='self._log.event("checkpoint_failed", str(error))\n        raise error',
        tests=("tests/unit/controller/test_saver.py",),
    ),
    Fault(
        name="damage-unnoticed",
        page="reliability",
        promise="A damaged checkpoint is refused at a resume.",
        old='return None if actual_digest == sums[name] else f"{name} is not as it was written"',
        new="return None",
        tests=("tests/unit/runtime/test_run_folder.py",),
    ),
    Fault(
        name="step-with-nan",
        page="reliability",
        promise="An optimizer step with a NaN in its gradient is skipped.",
        old="if finite and not idle:",
        new="if not idle:",
        tests=(
            "tests/unit/actor/test_trained_parts.py",
            "tests/integration/test_lost_groups.py",
        ),
    ),
    Fault(
        name="blind-engine",
        page="reliability",
        promise="The run stops when the engine does not see the images.",
        old='if kind != "no_image" and difference > noise and blank < difference / 2:',
        new="if False:",
        tests=("tests/unit/controller/test_mismatch.py",),
    ),
    Fault(
        name="endless-bad-rows",
        page="reliability",
        promise="If more than data.max_bad_rows of a split are bad, the run stops.",
        old="if n and n / total > self._max_fraction:",
        new="if n > total:",
        tests=("tests/unit/controller/test_bad_rows.py",),
    ),
    Fault(
        name="failed-trajectory-trained",
        page="reliability",
        promise="A trajectory that failed is masked.",
        old="for i, trajectory in enumerate(summary.trajectories)\n        if trajectory.error is None",
        new="for i, trajectory in enumerate(summary.trajectories)\n        if True",
        tests=("tests/unit/controller/test_step_plan.py",),
    ),
    Fault(
        name="path-leaves-the-folder",
        page="reliability",
        promise="Paths of images stay in the data set's folder.",
        old="if not path.is_relative_to(root.resolve()):",
        new="if False:",
        tests=("tests/unit/data/test_images.py",),
    ),
    Fault(
        name="redirect-to-any-host",
        page="reliability",
        promise="Images come from the listed hosts only, redirects included.",
        old="_check_host(newurl, hosts)",
        new="pass",
        tests=("tests/unit/data/test_fetch.py",),
    ),
    Fault(
        name="answer-without-limits",
        page="reliability",
        promise="A formula has half a second of processor time and 100 MB.",
        old="            limit(limit_s, wall_limit_s)\n",
        new="",
        tests=("tests/unit/rewards/test_hostile_answers.py",),
    ),
    Fault(
        name="one-mistake-at-a-time",
        page="reliability",
        promise="All mistakes of a config are reported at once.",
        old="return list(problems.values())",
        new="return list(problems.values())[:1]",
        tests=("tests/unit/config/test_config_load.py",),
    ),
    Fault(
        name="images-never-released",
        page="reliability",
        promise="Groups and their images are released after each step.",
        old="self._images.pop(name, None)",
        new="pass",
        tests=(
            "tests/unit/transport/test_group_store.py",
            "tests/integration/test_exchange.py",
        ),
    ),
)


class DoesNotApply(Exception):
    """An edit whose old text is missing or stands more than once."""


def located(fault: Fault, root: Path = ROOT) -> Path:
    """Return the only file of the package in which the fault's old text stands, exactly once.

    Raises:
        DoesNotApply: there is none, or there are more.
    """
    counts: dict[Path, int] = {}
    for path in sorted((root / PACKAGE).rglob("*.py")):
        if count := path.read_text(encoding="utf-8").count(fault.old):
            counts[path] = count
    if sum(counts.values()) != 1:
        places = ", ".join(f"{path.relative_to(root)} ({n})" for path, n in counts.items())
        raise DoesNotApply(
            f"fault {fault.name!r} ({fault.promise}): its old text stands in {places or 'no file'}, "
            f"not exactly once; mend its edit in {Path(__file__).relative_to(ROOT)}:\n{fault.old}"
        )
    return next(iter(counts))


@contextmanager
def planted(fault: Fault, root: Path) -> Iterator[Path]:
    """Have the fault in the copy at `root` during the block; yield the edited file."""
    path = located(fault, root)
    text = path.read_text(encoding="utf-8")
    path.write_text(text.replace(fault.old, fault.new), encoding="utf-8")
    try:
        yield path
    finally:
        path.write_text(text, encoding="utf-8")


def copy_repository(target: Path) -> None:
    """Copy the files that git tracks or would track, as they are in the working tree."""
    command = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    listing = subprocess.run(command, cwd=ROOT, check=True, capture_output=True, text=True).stdout
    for name in filter(None, listing.split("\0")):
        source = ROOT / name
        if source.exists():  # one deleted in the working tree is still tracked
            (target / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(source, target / name, follow_symlinks=False)


def run_tests(root: Path, marks: str, tests: Sequence[str]) -> tuple[int, str]:
    """Run the tests with these marks in the copy up to the first failure; return status, output.

    They run in a fork of this process, which has the libraries in memory: most of a short test's
    time is that of imports.
    """
    arguments = ["-q", "-x", "-p", "no:cacheprovider", "-p", "no:xdist", "-m", marks, *tests]
    with tempfile.TemporaryFile("w+") as output:
        pid = os.fork()
        if pid == 0:
            os.setsid()
            for descriptor in (1, 2):
                os.dup2(output.fileno(), descriptor)
            os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
            os.chdir(root)
            sys.path.insert(0, str(root))
            status = pytest.main(arguments)
            sys.stdout.flush()
            os._exit(status)
        deadline = time.monotonic() + TIMEOUT_S
        ended, status = 0, 0
        while not ended and time.monotonic() < deadline:
            ended, status = os.waitpid(pid, os.WNOHANG)
            time.sleep(0.1)
        if not ended:
            os.killpg(pid, signal.SIGKILL)
            os.waitpid(pid, 0)
            return TESTS_FAILED, f"FAILED tests hang: not over after {TIMEOUT_S} s"
        output.seek(0)
        return os.waitstatus_to_exitcode(status), output.read()


def find(fault: Fault, root: Path) -> tuple[str, str]:
    """Run the fault's tests with the fault in the copy.

    Returns:
        "quick", "slow" or "missed", and the test that failed or the reason why none did.
    """
    outcome = "no test ran"
    with planted(fault, root):
        for kind, marks in (("quick", "not slow"), ("slow", "slow")):
            status, output = run_tests(root, marks, fault.tests)
            failed = re.findall("^(?:FAILED|ERROR) (tests.+?)(?: - |$)", output, re.MULTILINE)
            if status == TESTS_FAILED and failed:
                return kind, failed[0]
            if status not in (0, 5):  # 5: no test has these marks
                outcome = f"pytest ended with {status}: {output.strip()[-300:]}"
            elif status == 0:
                outcome = f"the tests pass: {output.strip().splitlines()[-1]}"
    return "missed", outcome


def main() -> int:
    """Plant the faults one by one; return 1 if one is missed."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("names", nargs="*", help="faults by name; none means all")
    parser.add_argument("--list", action="store_true", help="print names and promises")
    arguments = parser.parse_args()
    unknown = set(arguments.names) - {fault.name for fault in FAULTS}
    if unknown:
        parser.error(f"no such fault: {', '.join(sorted(unknown))}; see --list")
    faults = [fault for fault in FAULTS if not arguments.names or fault.name in arguments.names]
    if arguments.list:
        for fault in faults:
            print(f"{fault.name:32} {fault.page}: {fault.promise}")
        return 0
    counts = {"quick": 0, "slow": 0, "missed": 0}
    data = os.environ.get("RLINF_VL_GEO3K") or str(ROOT.parent / "shared/data/geo3k")
    with tempfile.TemporaryDirectory(prefix="planted-faults-") as folder:
        copy_repository(Path(folder))
        # For processes that tests start; this one has imported nothing of ours.
        os.environ |= {"PYTHONPATH": folder, "RLINF_VL_GEO3K": data, "OMP_NUM_THREADS": "1"}
        sys.dont_write_bytecode = True
        for library in LIBRARIES:
            importlib.import_module(library)
        for fault in faults:
            start_time = time.monotonic()
            kind, test = find(fault, Path(folder))
            counts[kind] += 1
            seconds = time.monotonic() - start_time
            print(f"{kind:6} {fault.name:32} {seconds:4.0f} s  {test}", flush=True)
    print(
        f"{len(faults)} faults: the quick tests find {counts['quick']}, the slow ones "
        f"{counts['slow']} more, {counts['missed']} are missed"
    )
    return 1 if counts["missed"] else 0


if __name__ == "__main__":
    sys.exit(main())
