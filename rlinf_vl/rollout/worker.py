"""The rollout worker: a Ray actor with an engine, the data, a player, and the sampled groups.

Modules that take seconds to import are imported when the worker is made, because the controller
imports this one and needs neither an engine nor transformers.
"""

import asyncio
import logging
import math
import os
import time
from collections.abc import AsyncIterator, Callable, Collection, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from typing import TYPE_CHECKING, Any

import ray
import torch

from rlinf_vl.config.schema import Config
from rlinf_vl.data.dataset import FilterResult, open_datasets
from rlinf_vl.data.unusable import QUARANTINED, RowError
from rlinf_vl.engines.base import MEMORY_TAGS, EngineDied, low_memory, release_tags
from rlinf_vl.envs.registry import ENVIRONMENTS, SINGLE
from rlinf_vl.observe.spans import flush_spans, record_spans, span
from rlinf_vl.rollout.batch_stream import BatchStream, StoredGroup
from rlinf_vl.rollout.busy import LapClock
from rlinf_vl.rollout.submission import Task
from rlinf_vl.runtime.ray_process import (
    first_report,
    freeze_loaded,
    own_process,
    quick_imports,
    where,
)
from rlinf_vl.runtime.run_folder import run_folder
from rlinf_vl.transport import shared_memory
from rlinf_vl.transport.broadcast import WeightGroup
from rlinf_vl.transport.buckets import Label, WeightsDiffer
from rlinf_vl.transport.delta import Delta
from rlinf_vl.transport.groups import GroupStore
from rlinf_vl.transport.strategies import STORED, received
from rlinf_vl.types import Group, GroupSummary, Problem, Request, SamplingParams

if TYPE_CHECKING:
    from rlinf_vl.rollout.player import Opening

log = logging.getLogger(__name__)

#: Limit on the hanging calls of environments, each of which keeps a thread, before the worker is
#: replaced. Containers often allow 1,000 threads.
MAX_HUNG = 256


@dataclass(eq=False)
class OpenBatch:
    """The tasks of a batch that are being answered, by group id.

    Attributes:
        group_ids: all groups of the batch.
        plays: the episodes of groups whose environments have started.
        cancelled: groups that were cancelled, perhaps while their environments were starting.
    """

    group_ids: frozenset[str]
    plays: dict[str, asyncio.Future[Group]] = field(default_factory=dict)
    cancelled: set[str] = field(default_factory=set)

    def cancel(self, group_ids: Collection[str]) -> None:
        """Stop answering those of these groups that belong to this batch."""
        unwanted = self.group_ids.intersection(group_ids)
        self.cancelled |= unwanted
        for group_id in unwanted & self.plays.keys():
            self.plays[group_id].cancel()


class RolloutRank(BatchStream):
    """The worker itself; `RolloutWorker` is its Ray actor class."""

    def __init__(
        self,
        config: Config,
        model_path: str,
        device: str,
        number: int = 0,
        shared_gpu: bool = False,
    ) -> None:
        """
        Args:
            number: the worker's number, for traces.
            shared_gpu: whether an actor rank uses its GPU, too.
        """
        # The controller reports why a worker can't be made; Ray would print its traceback as well.
        logging.getLogger("ray._raylet").setLevel(logging.CRITICAL)
        record_spans(run_folder(config), f"rollout {number}")
        own_process(config.cluster.cpu_threads, device)
        with quick_imports():
            from rlinf_vl.engines.make import make_engine, warm_up
            from rlinf_vl.rollout.player import Player
            from rlinf_vl.rollout.renderer import Renderer
            from rlinf_vl.rollout.row_check import env_maker_of, processor_of, scorer_of
            from rlinf_vl.rollout.thoughts import ThoughtBudget
        self.config = config
        self.model_path = model_path
        self.device = device
        self.processor = processor_of(config, model_path)
        thinking = config.rollout.thinking
        self.renderer = Renderer(self.processor, thinking.mode)
        self.engine = make_engine(config, model_path, self.processor, device, shared_gpu)
        self.datasets = open_datasets(config.data, ENVIRONMENTS)
        sampling = {
            "train": config.algorithm.sampling_params,
            "val": config.algorithm.val_sampling_params,
        }
        self.sampling = {
            split: SamplingParams(**asdict(keys), stop_ids=self.processor.stop_ids)
            for split, keys in sampling.items()
        }
        if config.rollout.rollout_backend == "sglang":
            reads_images = self.processor.family.vision_tower is not None
            warm_up(
                self.engine,
                self.renderer.prompt,
                self.sampling.values(),
                config.runner.seq_length,
                reads_images,
            )
        #: The engine's count when the last group was finished.
        self.prefilled_tokens = self.engine.prefilled_tokens
        scorer = self.scorer = scorer_of(config, first_report=first_report)
        self.player = Player(
            self.engine,
            self.renderer,
            self.processor,
            env_maker_of(config, scorer),
            seq_length=config.runner.seq_length,
            max_prompt_length=config.data.max_prompt_length,
            reward_min=config.reward.reward_min_val,
            return_logprobs=config.rollout.return_logprobs,
            alive_timeout_s=config.runner.heartbeat_timeout,
            max_turns=config.rollout.max_turns,
            max_concurrent=config.rollout.max_concurrent_rollouts,
            turn_timeout_s=config.rollout.turn_timeout,
            episode_timeout_s=config.rollout.episode_timeout,
            overlong=config.data.overlong,
            penalize_faults=config.rollout.faults == "penalize",
            score=scorer,
            first_report=first_report,
            thought_budget=ThoughtBudget(self.renderer, thinking.budget)
            if thinking.budget
            else None,
        )
        self.clock = LapClock(self.player.busy.seconds)
        self.store = GroupStore()
        self.open_batches: list[OpenBatch] = []
        BatchStream.__init__(self)
        freeze_loaded()

    async def ready(self) -> dict[str, int]:
        """Return the number of rows of each split, once model and data are loaded.

        Raises:
            EngineDied.
        """
        if not await asyncio.to_thread(self.engine.alive, self.config.runner.heartbeat_timeout):
            raise EngineDied("its engine is dead")
        return {split: len(dataset) for split, dataset in self.datasets.items()}

    async def process(self) -> tuple[str, int]:
        """Return (node, process id) of the worker."""
        return where()

    async def reads_at(self) -> tuple[str, int]:
        """Return (place, process id): where this worker opens the memory of actor ranks."""
        return shared_memory.place_of(self.device), os.getpid()

    async def heartbeat(self) -> bool:
        """Return whether the engine is alive."""
        return await asyncio.to_thread(self.engine.alive, self.config.runner.heartbeat_timeout)

    async def filter_rows(
        self, split: str, rows: Sequence[int]
    ) -> tuple[FilterResult, dict[int, set[int]]]:
        """Check which rows can be used (`RowCheck.filter`).

        Returns:
            (the result, a number for each image of a row, by row). Equal images have equal numbers.
        """
        from rlinf_vl.rollout.row_check import RowCheck

        images: dict[int, set[int]] = {}

        def note_images(row: int, problem: Problem, request: Request | None) -> None:
            # 60 bits of the hash: a number is smaller to send than a text.
            images[row] = {int(image.hash[:15], 16) for image in problem.images}

        check = RowCheck(self.config, self.player.prompts, self.player.make_env)
        result = await asyncio.to_thread(check.filter, self.datasets[split], rows, note_images)
        return result, images

    async def generate(self, tasks: Sequence[Task]) -> AsyncIterator[list[StoredGroup]]:
        """Answer tasks; yield the groups that have finished since the last ones.

        Raises:
            EngineDied.
        """
        if (n_hung := self.player.calls.hung) > MAX_HUNG:
            raise EngineDied(f"{n_hung} calls of its environments hang, each in a thread")
        by_group = {task.group_id: task for task in tasks}
        batch = OpenBatch(frozenset(by_group))
        opened: list[Opening] = []
        self.open_batches.append(batch)
        self.clock.begin()
        try:
            problems = await asyncio.to_thread(lambda: list(map(self._problem, tasks)))
            # Groups may be cancelled while their rows are read, and while environments start.
            pairs = [
                (task, problem)
                for task, problem in zip(tasks, problems, strict=True)
                if task.group_id not in batch.cancelled
            ]
            env_names = {
                self.player.make_env.name_of(problem)
                for _, problem in pairs
                if isinstance(problem, Problem)
            }
            if env_names <= {SINGLE} and self.config.rollout.max_concurrent_rollouts is None:
                # Such environments start at once, so all requests go to the engine as one batch:
                # the embedded engine's results depend on it (see `Supervisor`).
                start = partial(self._open, opened, patience_s=None)
                openings = await asyncio.gather(*(start(task, problem) for task, problem in pairs))
                by_id: dict[str, Opening] = {}
                for (task, _), opening in zip(pairs, openings, strict=True):
                    if task.group_id not in batch.cancelled:
                        by_id[task.group_id] = opening
                self.player.submit(list(by_id.values()))
                plays = {
                    group_id: self.player.play(group_id, opening)
                    for group_id, opening in by_id.items()
                }
            else:
                plays = {
                    task.group_id: self._play(opened, task, problem) for task, problem in pairs
                }
            batch.plays = {
                group_id: asyncio.ensure_future(play) for group_id, play in plays.items()
            }
            waiting = set(batch.plays.values())
            while waiting:
                finished, waiting = await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
                groups = [play.result() for play in finished if not play.cancelled()]
                if groups:
                    yield [self._stored(group, by_group[group.id]) for group in groups]
        finally:
            # Groups are unfinished here if the engine died or the batch was abandoned.
            self.open_batches.remove(batch)
            play_futures = list(batch.plays.values())
            for future in play_futures:
                future.cancel()
            await asyncio.gather(*play_futures, return_exceptions=True)
            await asyncio.gather(*map(self.player.close, opened))
            self.clock.end()

    async def cancel(self, group_ids: Collection[str]) -> None:
        """Stop answering these groups."""
        for batch in self.open_batches:
            batch.cancel(group_ids)

    def _stored(self, group: Group, task: Task) -> StoredGroup:
        """Summarize a group, and put it into the object store unless only the summary is wanted.

        The summary includes the engine's busy seconds, elapsed seconds and prefilled tokens since
        the last group.
        """
        reference, object_bytes = None, 0
        if not task.summary_only:
            reference, object_bytes = self.store.put(group, own_images=task.own_images)
        summary = GroupSummary.of(group, self.processor.image_token_id, object_bytes)
        total_before, self.prefilled_tokens = self.prefilled_tokens, self.engine.prefilled_tokens
        summary = replace(
            summary,
            engine_seconds=self.clock.lap(),
            prefilled_tokens=self.prefilled_tokens - total_before,
            hung_calls=self.player.calls.hung,
        )
        return summary, reference

    async def _play(
        self, opened: "list[Opening]", task: Task, problem: Problem | Exception
    ) -> Group:
        """Start a task's environments, and play its group as soon as these have started."""
        opening = await self._open(opened, task, problem)
        self.player.submit([opening])
        return await self.player.play(task.group_id, opening)

    async def _open(
        self, opened: "list[Opening]", task: Task, problem: Problem | Exception, **patience: Any
    ) -> "Opening":
        """Start a task's environments, and add them to `opened`, whose environments get closed.

        If the row could not be read (`problem` is the error), all episodes fail.
        """
        from rlinf_vl.rollout.episode import Episode, Opening

        sampling = self.sampling[task.split]
        if isinstance(problem, Problem):
            opening = await self.player.open(
                problem,
                task.seeds,
                sampling,
                task.group_seed,
                task.corruption,
                trained=task.split == "train",
                **patience,
            )
            opened.append(opening)
        else:
            row = Problem(self.datasets[task.split].row_id(task.row), (), "")
            opened.append(
                Opening(row, sampling, [Episode(seed, error=problem) for seed in task.seeds])
            )
        return opened[-1]

    def _problem(self, task: Task) -> Problem | Exception:
        """Read a task's row; return the error if that fails."""
        if task.fault:
            return RowError(self.datasets[task.split].row_id(task.row), QUARANTINED, task.fault)
        try:
            # Chooses among the wordings of a question; validation always asks the same one.
            draw = task.group_seed if task.split == "train" else 0
            return self.datasets[task.split].problem(task.row, draw)
        except Exception as error:
            return error

    async def release(self, group_ids: Sequence[str] | None) -> None:
        """Free the memory of these groups (None: all)."""
        self.store.release(group_ids)

    async def load_weights(self, buckets: Sequence[ray.ObjectRef], version: int) -> None:
        await self._load("object_store", await asyncio.gather(*buckets), version)

    async def join_weight_group(self, group: WeightGroup) -> None:
        await asyncio.to_thread(self.engine.join_weight_group, group)

    async def take_weights(
        self, strategy: str, offers: Sequence[ray.ObjectRef], version: int
    ) -> float:
        """Take the weights that all ranks offer or will offer: the receiving side of a strategy.

        Returns:
            The seconds for which the engine was being written.

        Raises:
            WeightsDiffer: the weights received, or those that the engine then has, differ from the
                fingerprint of their label.
        """
        labels = [label for offer in await asyncio.gather(*offers) for label in offer.labels]
        if strategy in STORED:
            labels = await asyncio.gather(*labels)  # buckets, as views of the object store
        elif strategy == "shared_memory":
            labels = shared_memory.at(shared_memory.place_of(self.device), labels)
        return await self._load(strategy, labels, version)

    async def _load(self, strategy: str, labels: Sequence[Any], version: int) -> float:
        """Load weights into the engine and check them; return the seconds that the writing took."""
        # Changes applied to other weights than those they were computed from would corrupt them.
        for label in labels:
            if isinstance(label, Delta) and label.base not in (None, self.engine.version):
                raise WeightsDiffer(
                    f"weights of version {version} as changes of version {label.base}, but the "
                    f"engine has version {self.engine.version}"
                )
        start = time.perf_counter()
        with span("take weights", version=version):
            if strategy == "broadcast":
                await asyncio.to_thread(self.engine.load_broadcast, labels, version)
            else:
                weights = received(strategy, labels, self.device)
                try:
                    await asyncio.to_thread(self.engine.load_weights, weights, version)
                finally:
                    weights.close()  # a sender waits for receivers that are not done
        if self.device == "cuda":
            # The sender reuses its memory afterwards, so all copies must be complete.
            torch.cuda.synchronize()
        seconds = time.perf_counter() - start
        for label in labels:
            if isinstance(label, Label) and label.fingerprint is not None:
                fingerprint = await asyncio.to_thread(self.engine.fingerprint, label.names)
                if fingerprint is not None:
                    label.compare(fingerprint, "in the engine")
        if self.device == "cuda":
            # This process has copied buckets for SGLang's processes; a rank that shares the GPU
            # needs the memory.
            torch.cuda.ipc_collect()
            torch.cuda.empty_cache()
        return seconds

    async def release_tags(self) -> tuple[str, ...]:
        """Return the kinds of memory that this engine releases while the trainer needs its GPU.

        On the CPU, where releasing frees nothing, it is every kind: a call in the wrong order then
        fails there, too.
        """
        if self.device != "cuda":
            return MEMORY_TAGS
        from transformers import AutoConfig

        from rlinf_vl.models.loading import DTYPES, weight_shapes

        model = self.config.rollout.model
        config = AutoConfig.from_pretrained(
            self.model_path, trust_remote_code=model.trust_remote_code
        )
        weights = sum(
            map(
                math.prod,
                weight_shapes(config, self.processor.family, model.trust_remote_code).values(),
            )
        )
        weight_bytes = (
            weights * DTYPES[model.precision].itemsize // self.config.rollout.tensor_parallel_size
        )
        return release_tags(weight_bytes, torch.cuda.get_device_properties(0).total_memory)

    async def release_memory(self, tags: Sequence[str]) -> None:
        await self._memory(self.engine.release_memory, tags, "released")

    async def restore_memory(self, tags: Sequence[str]) -> None:
        await self._memory(self.engine.restore_memory, tags, "restored")
        if (
            self.device == "cuda"
            and "kv_cache" in tags
            and (warning := low_memory(torch.cuda.mem_get_info()[0]))
        ):
            log.warning(warning)

    async def _memory(
        self, change: Callable[[Sequence[str]], None], tags: Sequence[str], action: str
    ) -> None:
        """Release or restore memory. An engine that can't (no memory is free) counts as dead."""
        try:
            await asyncio.to_thread(change, tags)
        except RuntimeError as e:
            raise EngineDied(f"its memory was not {action}: {e}") from e

    async def stop(self) -> None:
        self.engine.close()
        self.scorer.close()
        flush_spans()


RolloutWorker = ray.remote(RolloutRank)
