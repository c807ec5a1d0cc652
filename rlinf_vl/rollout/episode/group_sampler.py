"""Samples the groups of tasks: an engine, the data and a player in one process. No Ray.

Modules that take seconds to import are imported when a sampler is made, because the controller
imports this one and needs neither an engine nor transformers.
"""

import asyncio
import logging
import math
from collections.abc import AsyncIterator, Callable, Collection, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from typing import TYPE_CHECKING, Any, Protocol

import torch

from rlinf_vl.config.parts import load_part
from rlinf_vl.config.schema import Config
from rlinf_vl.data.dataset import FilterResult, open_datasets
from rlinf_vl.data.unusable import QUARANTINED, RowError
from rlinf_vl.engines.base import MEMORY_TAGS, EngineDied, low_memory, release_tags
from rlinf_vl.envs import EnvMaker
from rlinf_vl.envs.registry import ENVIRONMENTS, SINGLE, load_env_class
from rlinf_vl.errors import never_reported
from rlinf_vl.rollout.episode.batch_stream import StoredGroup
from rlinf_vl.rollout.episode.loop_bridge import cancel_all
from rlinf_vl.rollout.submission import Task
from rlinf_vl.runtime.loading import quick_imports
from rlinf_vl.types import Group, GroupSummary, Problem, Reference, SamplingParams
from rlinf_vl.user_code import CodeError

if TYPE_CHECKING:
    from rlinf_vl.rewards.scoring import Scorer
    from rlinf_vl.rollout.episode.env_executor import EnvExecutor
    from rlinf_vl.rollout.episode.generation_client import GenerationClient
    from rlinf_vl.rollout.episode.group_player import EpisodeSettings, GroupPlayer
    from rlinf_vl.rollout.episode.request_builder import RequestBuilder
    from rlinf_vl.rollout.episode.rollout_state import RolloutGroup

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


class Store(Protocol):
    """Keeps sampled groups for those who train on them."""

    def put(self, group: Group, *, own_images: bool) -> tuple[Reference, int]:
        """Store a group; return a reference to it, and the bytes that this took.

        `own_images`: as in `Task`.
        """
        ...


class GroupSampler:
    """Answers batches of tasks.

    Attributes:
        prefilled_tokens: the engine's count when the last group was finished.
    """

    def __init__(
        self,
        config: Config,
        model_path: str,
        device: str,
        *,
        scorer: "Scorer",
        store: Store,
        first_report: Callable[[str], bool] = never_reported,
        executor: "EnvExecutor | None" = None,
        shared_gpu: bool = False,
    ) -> None:
        """
        Args:
            scorer: of the run's reward functions; `close` closes it.
            first_report: as in `make_scorer`.
            executor: as in `Player`.
            shared_gpu: whether an actor rank uses its GPU, too.
        """
        with quick_imports():
            from rlinf_vl.engines.make import make_engine, warm_up
            from rlinf_vl.rollout.episode.env_makers import env_maker_of
            from rlinf_vl.rollout.episode.generation_client import GenerationClient, LapClock
            from rlinf_vl.rollout.episode.group_player import EpisodeSettings, GroupPlayer
            from rlinf_vl.rollout.episode.request_builder import ThoughtBudget
            from rlinf_vl.rollout.episode.row_check import processor_of, request_builder_of
        self.config = config
        self.model_path = model_path
        self.device = device
        self.processor = processor_of(config, model_path)
        builder = request_builder_of(config, self.processor)
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
                builder.renderer.prompt,
                self.sampling.values(),
                config.runner.seq_length,
                reads_images,
            )
        # Importing the environment's module may take longer than one of its turns may. A module that
        # can't be imported is reported by the first row that needs it.
        if config.rollout.verifiers_name is None:
            with suppress(CodeError):
                load_env_class(config.rollout.env_class, config.runner.code_files)
        self.prefilled_tokens = self.engine.prefilled_tokens
        self.scorer = scorer
        thought_tokens = config.rollout.thinking.budget
        self.builder = builder
        self.make_env = env_maker_of(config, scorer, builder.renderer.words.reply_form)
        client = GenerationClient(
            self.engine,
            builder.renderer,
            alive_timeout_s=config.runner.heartbeat_timeout,
            budget=ThoughtBudget(builder.renderer, thought_tokens) if thought_tokens else None,
        )
        agent, has_agents = config.rollout.agent, config.rollout.has_agents
        settings = EpisodeSettings(
            reward_min=config.reward.reward_min_val,
            return_logprobs=config.rollout.return_logprobs,
            max_turns=config.rollout.max_turns,
            max_concurrent=(
                agent.max_concurrent if has_agents else config.rollout.max_concurrent_rollouts
            ),
            turn_timeout_s=config.rollout.turn_timeout,
            episode_timeout_s=config.rollout.episode_timeout,
            mask_ungraded=config.reward.ungradable == "mask",
            penalize_faults=config.rollout.faults == "penalize",
            privileged_template=config.algorithm.distillation.privileged_template,
            video=config.data.video,
        )
        self.player: GroupPlayer = (
            load_part("agent-player")(config, client, settings, scorer, first_report)
            if has_agents
            else _env_player(
                config, client, builder, self.make_env, settings, scorer, first_report, executor
            )
        )
        self.clock = LapClock(self.player.client.busy.seconds)
        self.open_batches: list[OpenBatch] = []
        self._store = store

    def close(self) -> None:
        """End the engine and the reward functions."""
        self.player.close()
        self.engine.close()
        self.scorer.close()

    async def filter_rows(
        self, split: str, rows: Sequence[int]
    ) -> tuple[FilterResult, dict[int, set[int]]]:
        """Check which rows can be used (`RowCheck.filter`).

        Returns:
            (the result, a number for each image of a row, by row). Equal images have equal numbers.
        """
        from rlinf_vl.rollout.episode.row_check import RowCheck

        images: dict[int, set[int]] = {}

        def note_images(row: int, problem: Problem, _: int) -> None:
            # 60 bits of the hash: a number is smaller to send than a text.
            images[row] = {int(image.hash[:15], 16) for image in problem.images}

        check = RowCheck(self.config, self.builder, self.make_env, split == "train")
        result = await asyncio.to_thread(check.filter, self.datasets[split], rows, note_images)
        return result, images

    async def generate(self, tasks: Sequence[Task]) -> AsyncIterator[list[StoredGroup]]:
        """Answer tasks; yield the groups that have finished since the last ones.

        Raises:
            EngineDied.
        """
        # A thread can't be ended from outside; only a new process gets rid of them.
        if (n_hung := self.player.hung) > MAX_HUNG:
            raise EngineDied(f"{n_hung} calls of its environments hang, each in a thread")
        by_group = {task.group_id: task for task in tasks}
        batch = OpenBatch(frozenset(by_group))
        opened: list[RolloutGroup] = []
        self.open_batches.append(batch)
        self.clock.begin()
        try:
            # In a thread: decoding rows holds up answers of other batches otherwise.
            problems = await asyncio.to_thread(lambda: list(map(self._problem, tasks)))
            # Groups may be cancelled while their rows are read, and while environments start.
            pairs = [
                (task, problem)
                for task, problem in zip(tasks, problems, strict=True)
                if task.group_id not in batch.cancelled
            ]
            by_problem = {
                task.group_id: problem for task, problem in pairs if isinstance(problem, Problem)
            }
            env_names = {
                self.make_env.name_of(problem)
                for _, problem in pairs
                if isinstance(problem, Problem)
            }
            if (
                env_names <= {SINGLE}
                and self.config.rollout.max_concurrent_rollouts is None
                and not self.config.rollout.has_agents
            ):
                # Such environments start at once, so all requests go to the engine as one batch:
                # the embedded engine's results depend on it (see `Supervisor`).
                start = partial(self._start_group, opened, patience_s=None)
                started = await asyncio.gather(*(start(task, problem) for task, problem in pairs))
                by_id: dict[str, RolloutGroup] = {}
                for (task, _), group in zip(pairs, started, strict=True):
                    if task.group_id not in batch.cancelled:
                        by_id[task.group_id] = group
                self.player.submit_first_requests(list(by_id.values()))
                plays = {
                    group_id: self.player.play_group(group_id, group)
                    for group_id, group in by_id.items()
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
                # A cancelled play has no group, and nobody waits for one.
                groups = [play.result() for play in finished if not play.cancelled()]
                if groups:
                    yield [
                        self._stored(group, by_group[group.id], by_problem.get(group.id))
                        for group in groups
                    ]
        finally:
            # Groups are unfinished here if the engine died or the batch was abandoned.
            self.open_batches.remove(batch)
            await cancel_all(batch.plays.values())
            await asyncio.gather(*map(self.player.close_group, opened))
            self.clock.end()

    async def cancel(self, group_ids: Collection[str]) -> None:
        """Stop answering these groups."""
        for batch in self.open_batches:
            batch.cancel(group_ids)

    def _stored(self, group: Group, task: Task, problem: Problem | None) -> StoredGroup:
        """Summarize a group, and put it into the object store unless only the summary is wanted.

        The summary includes the engine's busy seconds, elapsed seconds and prefilled tokens since
        the last group.
        """
        reference, object_bytes = None, 0
        if not task.summary_only:
            reference, object_bytes = self._store.put(group, own_images=task.own_images)
        summary = GroupSummary.of(group, self.processor.placeholder_ids, object_bytes)
        total_before, self.prefilled_tokens = self.prefilled_tokens, self.engine.prefilled_tokens
        summary = replace(
            summary,
            engine_seconds=self.clock.lap(),
            prefilled_tokens=self.prefilled_tokens - total_before,
            hung_calls=self.player.hung,
        )
        if task.control is not None and problem is not None:
            row_images = {image.hash for image in problem.images}
            n_env_images = sum(image.hash not in row_images for image, _ in group.images)
            summary = replace(summary, env_images=n_env_images)
        return StoredGroup(summary, reference)

    async def _play(
        self, opened: "list[RolloutGroup]", task: Task, problem: Problem | Exception
    ) -> Group:
        """Start a task's environments, and play its group as soon as these have started."""
        group = await self._start_group(opened, task, problem)
        self.player.submit_first_requests([group])
        return await self.player.play_group(task.group_id, group)

    async def _start_group(
        self,
        opened: "list[RolloutGroup]",
        task: Task,
        problem: Problem | Exception,
        **patience: Any,
    ) -> "RolloutGroup":
        """Start a task's environments, and add them to `opened`, whose environments get closed.

        If the row could not be read (`problem` is the error), all episodes fail.
        """
        from rlinf_vl.rollout.episode.rollout_state import RolloutGroup, RolloutState

        sampling = self.sampling[task.split]
        if isinstance(problem, Problem):
            group = await self.player.start_group(
                problem,
                task.seeds,
                sampling,
                task.group_seed,
                task.corruption,
                trained=task.split == "train",
                **patience,
            )
            opened.append(group)
        else:
            row = Problem(self.datasets[task.split].row_id(task.row), (), "")
            opened.append(
                RolloutGroup(
                    row, sampling, [RolloutState(row, seed, error=problem) for seed in task.seeds]
                )
            )
        return opened[-1]

    def _problem(self, task: Task) -> Problem | Exception:
        """Read a task's row; return the error if that fails."""
        if task.fault:
            return RowError(self.datasets[task.split].row_id(task.row), QUARANTINED, task.fault)
        try:
            # Chooses among the wordings of a question; validation always asks the same one.
            draw = task.group_seed if task.split == "train" else 0
            dataset = self.datasets[task.split]
            problem = dataset.problem(task.row, draw)
            return problem if task.control is None else task.control(problem, dataset.problem)
        except Exception as error:
            return error

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
            and (warning := low_memory(self._free_gpu_bytes()))
        ):
            log.warning(warning)

    def _free_gpu_bytes(self) -> int:
        """Return the free memory of the engine's fullest GPU."""
        if not self.engine.reads_labels:
            return torch.cuda.mem_get_info()[0]
        # By the driver's account: a context of this process would take memory of the GPU.
        return min(
            torch.cuda.get_device_properties(gpu).total_memory - torch.cuda.device_memory_used(gpu)
            for gpu in range(self.config.rollout.tensor_parallel_size)
        )

    async def _memory(
        self, change: Callable[[Sequence[str]], None], tags: Sequence[str], action: str
    ) -> None:
        """Release or restore memory. An engine that can't (no memory is free) counts as dead."""
        try:
            await asyncio.to_thread(change, tags)
        except RuntimeError as e:
            raise EngineDied(f"its memory was not {action}: {e}") from e


def _env_player(
    config: Config,
    client: "GenerationClient",
    builder: "RequestBuilder",
    make_env: EnvMaker,
    settings: "EpisodeSettings",
    scorer: "Scorer",
    first_report: Callable[[str], bool],
    executor: "EnvExecutor | None",
) -> "GroupPlayer":
    """Return the player of environments."""
    from rlinf_vl.rollout.episode.env_processes import ProcessEnvMaker
    from rlinf_vl.rollout.episode.player import Player

    maker: EnvMaker | ProcessEnvMaker = make_env
    if config.rollout.env_processes and config.cluster.backend != "local":
        maker = ProcessEnvMaker(config, make_env, settings.call_timeout_s)
    return Player(
        client,
        builder,
        maker,
        settings,
        score_answers=scorer,
        first_report=first_report,
        executor=executor,
    )
