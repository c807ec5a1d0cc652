"""A rollout worker: a Ray actor that reads problems, has its engine answer them, and grades the answers.

An error is data: a row that can't be read, an image that can't be decoded, an engine or an environment that fails becomes a
group whose trajectories carry the reason; it is counted and never trained on. An answer that the grader can't judge within
its limits is no error: it is wrong. Every environment that was made is closed, whatever fails.
"""

import asyncio
import logging
import math
from collections.abc import AsyncIterator, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import ray
import torch
from transformers import AutoConfig

from rlinf_vl.config.schema import Config, SamplingConfig
from rlinf_vl.data.dataset import FilterResult, ProblemDataset
from rlinf_vl.data.images import ImageError
from rlinf_vl.data.rows import (
    ANSWER_UNUSABLE,
    PROMPT_TOO_LONG,
    PROMPT_UNUSABLE,
    RowError,
    RowFormat,
    kind_and_reason,
)
from rlinf_vl.engines.base import MEMORY_TAGS, EngineDied, release_tags
from rlinf_vl.engines.make import make_engine, warm_up
from rlinf_vl.envs import Env, make_env
from rlinf_vl.models.families import family_of
from rlinf_vl.models.loading import DTYPES, weight_shapes
from rlinf_vl.models.processing import Processor
from rlinf_vl.observe.spans import flush_spans, record_spans, span
from rlinf_vl.rewards import GRADERS, REFERENCE_CHECKS, GradingError
from rlinf_vl.rollout.renderer import Renderer
from rlinf_vl.rollout.supervisor import Task
from rlinf_vl.runtime.ray_process import own_process, where
from rlinf_vl.runtime.run_folder import run_folder
from rlinf_vl.transport import received, shared_memory
from rlinf_vl.transport.broadcast import WeightGroup
from rlinf_vl.transport.groups import GroupStore
from rlinf_vl.types import (
    ENGINE_FAULT,
    ENVIRONMENT_FAULT,
    UNGRADABLE,
    Completion,
    Group,
    GroupSummary,
    Message,
    Problem,
    Request,
    Sample,
    SamplingParams,
    TokenSequence,
    Trajectory,
    Turn,
)

log = logging.getLogger(__name__)

#: The environment that grades by the reference answer alone.
SINGLE = "single_turn"


class RolloutFault(RuntimeError):
    """What failed is not the row: `kind` is `ENGINE_FAULT` or `ENVIRONMENT_FAULT`."""

    def __init__(self, kind: str, reason: str) -> None:
        super().__init__(kind, reason)
        self.kind, self.reason = kind, reason

    def __str__(self) -> str:
        return f"{self.kind}: {self.reason}"


@dataclass(frozen=True, slots=True)
class _Prepared:
    task: Task
    problem: Problem
    envs: tuple[Env, ...]
    request: Request


class RolloutRank:
    """The worker itself; `RolloutWorker` is the same as a Ray actor."""

    def __init__(self, config: Config, model_path: str, device: str, number: int = 0) -> None:
        """`number`: which of the workers it is, for traces."""
        # Why a worker can't be made, the controller says; Ray would print its traceback as well.
        logging.getLogger("ray._raylet").setLevel(logging.CRITICAL)
        record_spans(run_folder(config), f"rollout {number}")
        own_process(config.cluster.cpu_threads, device)
        self.config, self.model_path, self.device = config, model_path, device
        data, model_config = config.data, config.rollout.model
        self.processor = Processor(
            model_path,
            family_of(model_config.model_type),
            min_pixels=data.image_min_pixels,
            max_pixels=data.image_max_pixels,
            trust_remote_code=model_config.trust_remote_code,
        )
        self.renderer = Renderer(self.processor)
        self.engine = make_engine(config, model_path, self.processor, device)
        form = RowFormat(
            prompt_key=data.prompt_key,
            answer_key=data.answer_key,
            image_keys=data.image_keys,
            system_prompt=data.system_prompt,
            prompt_suffix=data.prompt_suffix,
            blank_images=data.blank_images,
            image_hosts=data.image_hosts,
        )
        self.datasets = {
            split: ProblemDataset(paths, split, form)
            for split, paths in (("train", data.train_data_paths), ("val", data.val_data_paths))
            if paths
        }
        self.sampling = {
            split: _sampling_params(s, self.processor.stop_ids)
            for split, s in (
                ("train", config.algorithm.sampling_params),
                ("val", config.algorithm.val_sampling_params),
            )
        }
        if config.rollout.rollout_backend == "sglang":
            warm_up(self.engine, self.renderer.prompt, self.sampling.values(), config.runner.seq_length)
        self.grade = GRADERS[config.reward.reward_type]
        self.store = GroupStore()

    async def ready(self) -> dict[str, int]:
        """Rows of each split; answering means that model and data are loaded, and that the engine lives."""
        if not await asyncio.to_thread(self.engine.alive, self.config.runner.heartbeat_timeout):
            raise EngineDied("its engine is dead")
        return {split: len(dataset) for split, dataset in self.datasets.items()}

    async def process(self) -> tuple[str, int]:
        """(node id, process id) of this worker."""
        return where()

    async def heartbeat(self) -> bool:
        """Whether the engine lives; that it answers at all says that the worker does."""
        return await asyncio.to_thread(self.engine.alive, self.config.runner.heartbeat_timeout)

    async def filter_rows(self, split: str, rows: Sequence[int]) -> tuple[FilterResult, dict[int, set[int]]]:
        """Which of `rows` can be used, graded, and have a prompt within data.max_prompt_length, expanded ids counted (a longer
        one is bad where data.filter_prompt_by_length is false); and by row a number that stands for each of its images."""
        images = {}
        limit = self.config.data.max_prompt_length

        # another environment may read the answer otherwise than the grader does
        check = (
            REFERENCE_CHECKS.get(self.config.reward.reward_type) if self.config.rollout.env_class == SINGLE else None
        )

        def length(row: int, problem: Problem) -> int:
            try:
                if check:
                    check(problem.answer)
            except GradingError as e:
                raise RowError(problem.id, ANSWER_UNUSABLE, str(e)) from e
            images[row] = {int(image.hash[:15], 16) for image in problem.images}
            ids, _ = self._prompt(problem, problem.messages, self.config.data.filter_prompt_by_length)
            return len(ids)

        return await asyncio.to_thread(self.datasets[split].filter_by_length, rows, length, limit), images

    async def generate(self, tasks: Sequence[Task]) -> AsyncIterator[tuple[GroupSummary, ray.ObjectRef]]:
        """Answer tasks; groups are yielded as they finish, as a summary and a reference to the `Group`."""
        running = []
        alone = {task.group_id for task in tasks if task.own_images}
        prepared: list[_Prepared] = []
        for task in tasks:
            try:
                with span("prepare"):
                    prepared.append(self._prepare(task))
            except Exception as e:
                log.warning("%s row %d: %s", task.split, task.row, e)
                running.append(asyncio.ensure_future(self._failed(task, e)))
        try:
            futures = self.engine.submit([p.request for p in prepared])
        except RuntimeError as e:
            _close(env for p in prepared for env in p.envs)
            raise EngineDied(f"it takes no requests: {e}") from e
        for p, future in zip(prepared, futures, strict=True):
            running.append(asyncio.ensure_future(self._finish(p, asyncio.wrap_future(future))))
        try:
            for finished in asyncio.as_completed(running):
                group = await finished
                reference, object_bytes = self.store.put(group, own_images=group.id in alone)
                yield GroupSummary.of(group, self.processor.image_token_id, object_bytes), reference
        finally:  # the engine died, or nobody wants the rest
            for future in running:
                future.cancel()
            await asyncio.gather(*running, return_exceptions=True)

    async def release(self, group_ids: Sequence[str] | None) -> None:
        """These groups (None: all) are no longer needed: their memory may go."""
        self.store.release(group_ids)

    def _prepare(self, task: Task) -> _Prepared:
        problem = self.datasets[task.split][task.row]
        envs: list[Env] = []
        try:
            messages = self._start(problem, len(task.seeds), envs)
            try:
                ids, grids = self._prompt(problem, messages)
            except RowError as e:
                if e.kind != PROMPT_UNUSABLE or messages == list(problem.messages):
                    raise
                name = self.config.rollout.env_class
                reason = f"{name!r} began with messages that make no prompt: {e.reason}"
                raise RolloutFault(ENVIRONMENT_FAULT, reason) from e
        except BaseException:
            _close(envs)
            raise
        request = Request(ids, problem.images, grids, self.sampling[task.split], task.seeds)
        return _Prepared(task, problem, tuple(envs), request)

    def _start(self, problem: Problem, n: int, envs: list[Env]) -> Sequence[Message]:
        """Make `n` environments, each in `envs` as soon as it is there, and start them; what all of them said.

        Raises:
            RolloutFault: one of them failed, or their first messages differ: a group shares one prompt.
        """
        name, reward = self.config.rollout.env_class, self.config.reward
        try:
            for _ in range(n):
                envs.append(
                    make_env(name, grade=self.grade, reward_max=reward.reward_max_val, reward_min=reward.reward_min_val)
                )
            starts = [list(env.start(problem)) for env in envs]
            differ = any(start != starts[0] for start in starts)
        except Exception as e:
            raise RolloutFault(ENVIRONMENT_FAULT, f"{name!r} did not start: {type(e).__name__}: {e}") from e
        if differ:
            raise RolloutFault(
                ENVIRONMENT_FAULT,
                f"{name!r} began the {n} trajectories of a group with different messages; they share one prompt, so draw "
                "what is random in start() from the problem (problem.id)",
            )
        return starts[0]

    def _prompt(
        self, problem: Problem, messages: Sequence[Message], any_length: bool = False
    ) -> tuple[np.ndarray, np.ndarray]:
        try:
            ids, grids = self.renderer.prompt(messages, problem.images)
        except Exception as e:  # what the chat template, the tokenizer or the processor refuses
            raise RowError(problem.id, PROMPT_UNUSABLE, f"{type(e).__name__}: {e}") from e
        limit = self.config.data.max_prompt_length
        if len(ids) > limit and not any_length:
            reason = f"the prompt has {len(ids)} tokens, data.max_prompt_length is {limit}"
            raise RowError(problem.id, PROMPT_TOO_LONG, reason)
        return ids, grids

    async def _finish(self, prepared: _Prepared, future: "asyncio.Future[Completion]") -> Group:
        try:
            completion = await future
        except BaseException as e:
            _close(prepared.envs)
            if not isinstance(e, Exception):
                raise
            if not await asyncio.to_thread(self.engine.alive, self.config.runner.heartbeat_timeout):
                raise EngineDied(f"the engine died: {e}") from e
            log.warning("%s row %d: generation failed: %s", prepared.task.split, prepared.task.row, e)
            if not isinstance(e, (RowError, ImageError)):
                e = RolloutFault(ENGINE_FAULT, f"{type(e).__name__}: {e}")
            return await self._failed(prepared.task, e)
        graded = asyncio.gather(
            *(
                asyncio.to_thread(self._grade, prepared, env, sample)
                for env, sample in zip(prepared.envs, completion.samples, strict=True)
            )
        )
        trajectories = await asyncio.shield(graded)  # each closes its environment, also where nobody waits any more
        return Group(
            id=prepared.task.group_id,
            problem_id=prepared.problem.id,
            prefix_length=len(prepared.request.ids),
            trajectories=tuple(trajectories),
            answer=prepared.problem.answer,
        )

    def _grade(self, prepared: _Prepared, env: Env, sample: Sample) -> Trajectory:
        text = self.processor.decode(sample.ids)
        reward, correct, parts, error = 0.0, False, {}, None
        try:
            if sample.finish_reason == "error":
                raise RolloutFault(ENGINE_FAULT, "it gave up on this sample")
            with span("environment"):
                result = env.step(text)
            if not math.isfinite(result.reward):
                raise ValueError(f"it gave reward {result.reward}")
            parts = {str(name): float(part) for name, part in dict(result.info.get("reward_parts", {})).items()}
            reward, correct = float(result.reward), bool(result.info.get("correct", False))
        except GradingError as e:
            log.info("%s: no verdict, so the answer is wrong: %s", prepared.problem.id, e)
            reward, parts = self.config.reward.reward_min_val, {UNGRADABLE: 1.0}
        except RolloutFault as e:
            error = str(e)
        except Exception as e:
            error = f"{ENVIRONMENT_FAULT}: {self.config.rollout.env_class!r} failed: {type(e).__name__}: {e}"
        finally:
            _close((env,))
        if error:
            log.warning("%s: %s", prepared.problem.id, error)
        sequence = TokenSequence.of_sample(prepared.request, sample)
        sequence.assert_images_placed(self.processor.image_token_id, self.processor.merge_size)
        if not self.config.rollout.return_logprobs:
            sequence = replace(sequence, logprobs=None)
        turn = Turn(0, len(prepared.request.ids), len(sequence.ids), sample.finish_reason, reward)
        return Trajectory((sequence,), (turn,), reward, parts, sample.finish_reason, correct, error)

    async def _failed(self, task: Task, error: Exception) -> Group:
        """A group without tokens whose trajectories carry the reason, its kind first."""
        reason = str(error) if isinstance(error, RolloutFault) else ": ".join(kind_and_reason(error))
        trajectory = Trajectory((), (), 0.0, {}, "error", error=reason)
        row_id = self.datasets[task.split].row_id(task.row)
        return Group(task.group_id, row_id, 0, (trajectory,) * len(task.seeds))

    async def load_weights(self, buckets: Sequence[ray.ObjectRef], version: int) -> None:
        """Take published weights, bucket by bucket, as `version`."""
        await self.take_weights("object_store", buckets, version)

    async def join_weight_group(self, group: WeightGroup) -> None:
        """As `Engine.join_weight_group`."""
        await asyncio.to_thread(self.engine.join_weight_group, group)

    async def take_weights(self, way: str, labels: Sequence[Any], version: int) -> None:
        """Take the weights of these labels, as `version`: the receiving side of each strategy (`rlinf_vl.transport`).

        Raises:
            WeightsDiffer: a label has a fingerprint, and what came, or what the engine then holds, has another.
        """
        if way == "object_store":
            labels = await asyncio.gather(*labels)  # buckets: views of the object store, not copies
        elif way == "shared_memory":
            labels = shared_memory.at(shared_memory.place_of(self.device), labels)
        with span("take weights", version=version):
            if way == "broadcast":
                await asyncio.to_thread(self.engine.load_broadcast, labels, version)
            else:
                await asyncio.to_thread(self.engine.load_weights, received(way, labels), version)
        if self.device == "cuda":
            torch.cuda.synchronize()  # copied, so the sender may take its memory back
        for label in labels:
            if label.fingerprint is not None:
                found = await asyncio.to_thread(self.engine.fingerprint, label.names)
                if found is not None:
                    label.compare(found, "in the engine")
        if self.device == "cuda":  # this process has copied buckets for SGLang's, and shares its GPU with a rank
            torch.cuda.ipc_collect()
            torch.cuda.empty_cache()

    async def release_tags(self) -> tuple[str, ...]:
        """What this engine gives back while the trainer needs its GPU. On the CPU, where nothing is freed, everything: so
        that a fault of order shows there."""
        if self.device != "cuda":
            return MEMORY_TAGS
        model = self.config.rollout.model
        config = AutoConfig.from_pretrained(self.model_path, trust_remote_code=model.trust_remote_code)
        weights = sum(map(math.prod, weight_shapes(config, model.trust_remote_code).values()))
        weight_bytes = weights * DTYPES[model.precision].itemsize // self.config.rollout.tensor_parallel_size
        return release_tags(weight_bytes, torch.cuda.get_device_properties(0).total_memory)

    async def release_memory(self, tags: Sequence[str]) -> None:
        """As `Engine.release_memory`; an engine that can't is taken for dead."""
        try:
            await asyncio.to_thread(self.engine.release_memory, tags)
        except RuntimeError as e:
            raise EngineDied(f"its memory was not released: {e}") from e

    async def restore_memory(self, tags: Sequence[str]) -> None:
        """As `Engine.restore_memory`; an engine that can't (no memory is free, say) is taken for dead."""
        try:
            await asyncio.to_thread(self.engine.restore_memory, tags)
        except RuntimeError as e:
            raise EngineDied(f"its memory was not restored: {e}") from e

    async def stop(self) -> None:
        """End the engine; spans are written out."""
        self.engine.close()
        flush_spans()


def _sampling_params(sampling: SamplingConfig, stop_ids: tuple[int, ...]) -> SamplingParams:
    assert sampling.max_new_tokens is not None, "load_config fills it in"
    return SamplingParams(sampling.temperature, sampling.top_p, sampling.top_k, sampling.max_new_tokens, stop_ids)


def _close(envs: Iterable[Env]) -> None:
    for env in envs:
        try:
            env.close()
        except Exception as e:  # its trajectory is what it is
            log.warning("an environment did not close: %s: %s", type(e).__name__, e)


RolloutWorker = ray.remote(RolloutRank)
