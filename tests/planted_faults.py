"""Plants faults in a copy of the repository, and reports which tests find them.

There is a fault for each promise of docs/architecture.md and docs/reliability.md: a small edit of
the source, and the test files that keep the promise. A fault is found when one of these tests
fails. Its quick tests run first, and the slow ones if they find nothing.

    python tests/planted_faults.py                  # all faults
    python tests/planted_faults.py token-budget …   # some
    python tests/planted_faults.py --list

An edit names a function and a piece of its code, but no file: it applies wherever the function has
moved and however its lines are broken. One that no longer applies is an error that names it
(tests/unit/package/test_planted_faults.py), to be mended here, or replaced by another edit that
breaks the same promise.
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

import edits
import pytest

ROOT = Path(__file__).resolve().parents[1]
PACKAGE = "rlinf_vl"
#: Libraries whose imports take seconds.
LIBRARIES = (
    *("torch", "transformers.modeling_utils", "datasets"),
    *("pandas", "hypothesis", "ray"),
)
#: Time limit of one fault's test files, in seconds: a fault may make a test hang.
TIMEOUT_S = 900
#: Exit status of pytest when tests have failed; other failures are of pytest or of the edit.
TESTS_FAILED = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Fault:
    """An edit that breaks one promise.

    Attributes:
        page: the page that makes the promise, `architecture` or `reliability`.
        place: the function, method or class of the code, such as `GroupStore.put`; empty for a module.
        old: an expression or a statement that stands in it exactly once, in any layout.
        new: the code that replaces it.
        tests: the test files that keep the promise.
    """

    name: str
    page: str
    promise: str
    place: str
    old: str
    new: str
    tests: tuple[str, ...]


FAULTS = (
    # --- docs/architecture.md ---------------------------------------------------------------------
    Fault(
        name="controller-gets-pixels",
        page="architecture",
        promise="The controller never touches a pixel or a token.",
        place="TrajectorySummary.of",
        old="trajectory.turn_states",
        new="(*trajectory.turn_states, trajectory.sequences)",
        tests=("tests/integration/test_controller_receives.py",),
    ),
    Fault(
        name="image-stored-twice",
        page="architecture",
        promise="An image exists once, however many groups show it.",
        place="GroupStore.put",
        old="image.hash not in self._images",
        new="True",
        tests=("tests/unit/transport/test_group_store.py",),
    ),
    Fault(
        name="ids-encoded-again",
        page="architecture",
        promise="What follows in a conversation extends the sampled ids.",
        place="Renderer.follow",
        old="has_ended and ids[-1] == new_ids[0]",
        new="False",
        tests=("tests/unit/rollout/test_renderer.py",),
    ),
    Fault(
        name="placeholders-unmerged",
        page="architecture",
        promise="The number of image placeholders equals what the grids make (t·h·w / merge²).",
        place="ImageTokens.__call__",
        old="self.merge_size ** 2",
        new="self.merge_size",
        tests=("tests/unit/models/test_processing.py",),
    ),
    Fault(
        name="vision-ids-sampled",
        page="architecture",
        promise="Vision placeholders, padding and unused ids cannot be sampled.",
        place="Processor.banned_ids",
        old="{self.tokenizer.pad_token_id, *map(vocabulary.get, self.family.special_tokens)}",
        new="{self.tokenizer.pad_token_id}",
        tests=("tests/unit/models/test_processing.py",),
    ),
    Fault(
        name="softmax-over-banned-ids",
        page="architecture",
        promise="The trainer's softmax leaves the same ids out.",
        place="_logits",
        old="logits if banned is None else logits.index_fill_(1, banned, -torch.inf)",
        new="logits",
        tests=("tests/unit/models/test_logprobs.py",),
    ),
    Fault(
        name="version-of-request",
        page="architecture",
        promise="Every token knows the weights that sampled it.",
        place="Batch._draw",
        old="row.versions.append(version)",
        new="row.versions.append(row.versions[0] if row.versions else version)",
        tests=("tests/unit/engines/test_weights_in_flight.py",),
    ),
    Fault(
        name="temperature-the-wrong-way",
        page="architecture",
        promise="A logprob is that of the distribution sampled from, temperature included.",
        place="Sampler.__call__",
        old="logits.div_",
        new="logits.mul_",
        tests=("tests/unit/engines/test_sampling.py", "tests/unit/engines/test_torch_engine.py"),
    ),
    Fault(
        name="algorithms-import-ours",
        page="architecture",
        promise="algorithms/ imports torch and nothing of ours; arrows go one way.",
        place="aggregate",
        old="divisor = count if denominator is None else denominator",
        new="import rlinf_vl.errors\n\ndivisor = count if denominator is None else denominator",
        tests=("tests/unit/package/test_imports.py",),
    ),
    Fault(
        name="column-of-other-tokens",
        page="architecture",
        promise="A per-token column of the engine arrives in the trainer.",
        place="Collator.__call__",
        old="(p.sequence, t)",
        new="(p.sequence, t - 1)",
        tests=("tests/unit/packing/test_collator.py",),
    ),
    Fault(
        name="mean-of-means",
        page="architecture",
        promise="The loss does not depend on packing: denominators are global counts.",
        place="aggregate",
        old="count if denominator is None else denominator",
        new="count",
        tests=(
            "tests/unit/algorithms/test_aggregation.py",
            "tests/integration/test_update_invariance.py",
        ),
    ),
    Fault(
        name="gradient-of-one-rank",
        page="architecture",
        promise="The gradient does not depend on how many ranks there are.",
        place="Trainer.update",
        old="loss * self.mesh.size",
        new="loss",
        tests=("tests/integration/test_update_invariance.py",),
    ),
    Fault(
        name="prefix-merged-wrong",
        page="architecture",
        promise="Attention over a shared prompt, merged by log-sum-exps, is the exact softmax.",
        place="merge",
        old="torch.logaddexp",
        new="torch.maximum",
        tests=("tests/unit/models/test_attention.py",),
    ),
    Fault(
        name="prefix-gradient-lost",
        page="architecture",
        promise="Each part's backward is exact for its own keys.",
        place="Layout.backward",
        old="grad_sum[tokens] += part_grad",
        new="grad_sum[tokens] = part_grad",
        tests=("tests/unit/models/test_attention.py",),
    ),
    Fault(
        name="vision-of-one-rank",
        page="architecture",
        promise="Every rank makes the same calls in every micro-step, so no collective waits.",
        place="plan_micro_batches",
        old="(item.patches for rank in per_rank for item in rank[step])",
        new="(item.patches for item in per_rank[0][step])",
        tests=("tests/unit/packing/test_planner.py",),
    ),
    Fault(
        name="token-budget",
        page="architecture",
        promise="A micro-batch never exceeds its token budget.",
        place="_fill",
        old="once_tokens[group[first]] + tokens[end]",
        new="tokens[end]",
        tests=("tests/unit/packing/test_planner.py",),
    ),
    Fault(
        name="stream-without-step",
        page="architecture",
        promise="A sample's random stream depends on seed, step, row and sample.",
        place="make_tasks",
        old="stream_seed(seed, split, stream_step, k, row, i)",
        new="stream_seed(seed, split, k, row, i)",
        tests=("tests/unit/controller/test_loop.py",),
    ),
    Fault(
        name="positions-behind-images",
        page="architecture",
        promise="M-RoPE positions are computed for each whole sequence from its image grids.",
        place="mrope_positions",
        old="max(steps, h, w)",
        new="max(steps, h)",
        tests=("tests/unit/models/test_image_tokens.py",),
    ),
    Fault(
        name="features-of-this-step-dropped",
        page="architecture",
        promise="Features of a frozen tower are computed once a step and kept by content hash.",
        place="VisionCache._store",
        old="oldest in self._pinned",
        new="False",
        tests=("tests/unit/models/test_vision_cache.py",),
    ),
    Fault(
        name="pass-that-gives-nothing-new",
        page="architecture",
        promise="The first optimizer step's old logprobs are its own forward's.",
        place="Trainer._logprobs_before",
        old="0 if self.actor.model.is_lora and self.actor.model.lora.dropout else 1",
        new="0",
        tests=("tests/unit/actor/test_old_policies.py",),
    ),
    Fault(
        name="logits-of-all-positions",
        page="architecture",
        promise="No tensor of all positions by the whole vocabulary ever exists.",
        place="",
        old='CHUNK_BYTES = {"cpu": 2**24, "cuda": 2**30}',
        new='CHUNK_BYTES = {"cpu": 2**44, "cuda": 2**44}',
        tests=("tests/unit/models/test_head_memory.py",),
    ),
    Fault(
        name="session-of-another-image",
        page="architecture",
        promise="A session's keys are used for exactly the tokens and images that they are of.",
        place="CachedPrefix.reusable_for",
        old="image.hash != cached_hash",
        new="image is None",
        tests=("tests/unit/engines/test_prefix_cache.py",),
    ),
    Fault(
        name="keys-of-old-weights",
        page="architecture",
        promise="With kv_after_update=recompute, logprobs are those of each token's weights.",
        place="TorchEngine.load_weights",
        old="self._cache_outdated = True",
        new="self._cache_outdated = False",
        tests=("tests/unit/engines/test_weights_in_flight.py",),
    ),
    Fault(
        name="routes-not-replayed",
        page="architecture",
        promise="With routing_replay the trainer's policy takes the experts of the engine.",
        place="Routing.__call__",
        old="torch.where(is_reported[:, None], engine_choice, router_choice)",
        new="router_choice",
        tests=("tests/unit/models/test_mixture.py", "tests/unit/actor/test_routing_replay.py"),
    ),
    Fault(
        name="fingerprint-not-compared",
        page="architecture",
        promise="The first sync's fingerprint must be that of what arrives.",
        place="Label.compare",
        old="self.fingerprint not in (None, actual)",
        new="False",
        tests=("tests/unit/weights/test_fingerprint.py", "tests/integration/test_weight_sync.py"),
    ),
    # --- docs/reliability.md ----------------------------------------------------------------------
    Fault(
        name="groups-not-sent-again",
        page="reliability",
        promise="All groups of a dead worker are sent again.",
        place="Dispatcher.requeue",
        old="submission.arrived -= resent",
        new="pass",
        tests=("tests/unit/rollout/test_supervisor.py",),
    ),
    Fault(
        name="wedged-engine-alive",
        page="reliability",
        promise="An engine without progress counts as hung.",
        place="TorchEngine.alive",
        old="idle_s > timeout_s and (self._stepping or self._may_step())",
        new="False",
        tests=("tests/unit/engines/test_torch_engine.py",),
    ),
    Fault(
        name="endless-restarts",
        page="reliability",
        promise="Ranks start again at most three times from one checkpoint.",
        place="Restarts.count",
        old="self._times[checkpoint] += 1",
        new="self._times[checkpoint] = 0",
        tests=("tests/unit/controller/test_supervise.py",),
    ),
    Fault(
        name="terminal-signals-ray",
        page="reliability",
        promise="Ray's processes have sessions of their own, so that only the run hears Ctrl-C.",
        place="_own_sessions",
        old="partial(popen, start_new_session=True)",
        new="partial(popen)",
        tests=("tests/e2e/test_recovery.py",),
    ),
    Fault(
        name="grace-period-unwatched",
        page="reliability",
        promise="The run ends before runner.grace_period is over.",
        place="StopRequest._receive",
        old="self._end.start()",
        new="pass",
        tests=("tests/unit/runtime/test_stop_request.py",),
    ),
    Fault(
        name="checkpoint-in-place",
        page="reliability",
        promise="Whatever is killed while a checkpoint is written, the one before is whole.",
        place="write_aside",
        old="os.rename(path, replaced)",
        new="shutil.rmtree(path)",
        tests=("tests/unit/runtime/test_run_folder.py",),
    ),
    Fault(
        name="step-saved-again-lost",
        page="reliability",
        promise="An older checkpoint of a step gets its name back after a crash.",
        place="_mend",
        old="os.rename(replaced, path)",
        new="pass",
        tests=("tests/unit/runtime/test_run_folder.py",),
    ),
    Fault(
        name="two-runs-in-a-folder",
        page="reliability",
        promise="A second run in a folder that is in use is refused.",
        place="locked",
        old="fcntl.LOCK_EX",
        new="fcntl.LOCK_SH",
        tests=("tests/unit/runtime/test_run_start.py",),
    ),
    Fault(
        name="newer-branch-mixed-in",
        page="reliability",
        promise="Checkpoints newer than the one resumed from are kept in abandoned-N/.",
        place="_set_newer_aside",
        old="checkpoint_step > step",
        new="checkpoint_step > step + 9 ** 9",
        tests=("tests/unit/runtime/test_run_start.py",),
    ),
    Fault(
        name="schedule-begins-anew",
        page="reliability",
        promise="The learning rate's schedule goes on from the step of the checkpoint.",
        place="Trainer.load",
        old="self._schedule(done=step)",
        new="self._schedule(done=0)",
        tests=("tests/unit/actor/test_checkpoint.py",),
    ),
    Fault(
        name="row-never-alone",
        page="reliability",
        promise="A row that kills workers is answered alone, then quarantined.",
        place="Quarantine.must_be_alone",
        old="self._deaths[task.split, task.row] == MAX_ROW_DEATHS - 1",
        new="False",
        tests=("tests/unit/rollout/test_supervisor.py",),
    ),
    Fault(
        name="lines-of-a-full-disk-lost",
        page="reliability",
        promise="Lines that a full disk refuses are kept and written when they fit.",
        place="LineFile.append",
        old="self._unwritten_lines += lines",
        new="self._unwritten_lines = lines",
        tests=("tests/unit/runtime/test_files.py",),
    ),
    Fault(
        name="full-disk-ends-the-run",
        page="reliability",
        promise="Training goes on when a checkpoint does not fit the disk.",
        place="Saver._failed",
        old="if last:\n    raise error",
        new="raise error",
        tests=("tests/unit/controller/test_saver.py",),
    ),
    Fault(
        name="damage-unnoticed",
        page="reliability",
        promise="A damaged checkpoint is refused at a resume.",
        place="damage.problem",
        old="None if actual_digest == sums[name] else f'{name} is not as it was written'",
        new="None",
        tests=("tests/unit/runtime/test_run_folder.py",),
    ),
    Fault(
        name="step-with-nan",
        page="reliability",
        promise="An optimizer step with a NaN in its gradient is skipped.",
        place="Trainer._optimize",
        old="finite and (not idle)",
        new="not idle",
        tests=(
            "tests/unit/actor/test_trained_parts.py",
            "tests/integration/test_lost_groups.py",
        ),
    ),
    Fault(
        name="blind-engine",
        page="reliability",
        promise="The run stops when the engine does not see the images.",
        place="judge",
        old="kind != 'no_image' and difference > noise and (blank < difference / 2)",
        new="False",
        tests=("tests/unit/controller/test_mismatch.py",),
    ),
    Fault(
        name="endless-bad-rows",
        page="reliability",
        promise="If more than data.max_bad_rows of a split are bad, the run stops.",
        place="BadRows.check",
        old="n and n / total > self._max_fraction",
        new="n > total",
        tests=("tests/unit/controller/test_bad_rows.py",),
    ),
    Fault(
        name="failed-trajectory-trained",
        page="reliability",
        promise="A trajectory that failed is masked.",
        place="trainable",
        old="trajectory.error is None",
        new="True",
        tests=("tests/unit/controller/test_step_plan.py",),
    ),
    Fault(
        name="path-leaves-the-folder",
        page="reliability",
        promise="Paths of images stay in the data set's folder.",
        place="file_inside",
        old="not path.is_relative_to(root.resolve())",
        new="False",
        tests=("tests/unit/data/test_images.py",),
    ),
    Fault(
        name="redirect-to-any-host",
        page="reliability",
        promise="Images come from the listed hosts only, redirects included.",
        place="_read.RedirectToListed.redirect_request",
        old="_check_host(newurl, hosts)",
        new="pass",
        tests=("tests/unit/data/test_fetch.py",),
    ),
    Fault(
        name="answer-without-limits",
        page="reliability",
        promise="A formula has half a second of processor time and 100 MB.",
        place="serve",
        old="limit(limit_s, wall_limit_s)",
        new="pass",
        tests=("tests/unit/rewards/test_hostile_answers.py",),
    ),
    Fault(
        name="one-mistake-at-a-time",
        page="reliability",
        promise="All mistakes of a config are reported at once.",
        place="_fill",
        old="list(problems.values())",
        new="list(problems.values())[:1]",
        tests=("tests/unit/package/test_refusals_table.py",),
    ),
    Fault(
        name="images-never-released",
        page="reliability",
        promise="Groups and their images are released after each step.",
        place="GroupStore.release",
        old="self._images.pop(name, None)",
        new="pass",
        tests=(
            "tests/unit/transport/test_group_store.py",
            "tests/integration/test_exchange.py",
        ),
    ),
)


def edited(fault: Fault, root: Path = ROOT) -> tuple[Path, str]:
    """Return the file below `root` that the fault is planted in, and its source with the fault.

    Raises:
        edits.DoesNotApply: the place is missing, or not the only one.
    """
    try:
        path, node = edits.find(root / PACKAGE, fault.place, fault.old)
    except edits.DoesNotApply as error:
        raise edits.DoesNotApply(
            f"fault {fault.name!r} ({fault.promise}), to be mended in {Path(__file__).name}: {error}"
        ) from None
    return path, edits.replaced(path.read_text(encoding="utf-8"), node, fault.new)


@contextmanager
def planted(path: Path, source: str) -> Iterator[None]:
    """Have another source in the file during the block."""
    text = path.read_text(encoding="utf-8")
    path.write_text(source, encoding="utf-8")
    try:
        yield
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


def use_copy(root: Path) -> None:
    """Have processes that tests start from now on use the copy; this one has imported nothing of ours."""
    data = os.environ.get("RLINF_VL_GEO3K") or str(ROOT.parent / "shared/data/geo3k")
    os.environ |= {"PYTHONPATH": str(root), "RLINF_VL_GEO3K": data, "OMP_NUM_THREADS": "1"}
    sys.dont_write_bytecode = True


def load_libraries() -> None:
    """Import `LIBRARIES`, for the forks that run tests."""
    for library in LIBRARIES:
        importlib.import_module(library)


def run_tests(
    root: Path, marks: str, tests: Sequence[str], limit_s: float = TIMEOUT_S
) -> tuple[int, str]:
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
        deadline = time.monotonic() + limit_s
        ended, status = 0, 0
        while not ended and time.monotonic() < deadline:
            ended, status = os.waitpid(pid, os.WNOHANG)
            time.sleep(0.1)
        if not ended:
            os.killpg(pid, signal.SIGKILL)
            os.waitpid(pid, 0)
            return TESTS_FAILED, f"FAILED tests hang: not over after {limit_s:.0f} s"
        output.seek(0)
        return os.waitstatus_to_exitcode(status), output.read()


def find(fault: Fault, root: Path) -> tuple[str, str]:
    """Run the fault's tests with the fault in the copy.

    Returns:
        "quick", "slow" or "missed", and the test that failed or the reason why none did.
    """
    outcome = "no test ran"
    with planted(*edited(fault, root)):
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
    with tempfile.TemporaryDirectory(prefix="planted-faults-") as folder:
        copy_repository(Path(folder))
        use_copy(Path(folder))
        load_libraries()
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
