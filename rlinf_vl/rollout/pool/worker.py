"""The rollout worker: a Ray actor with an engine, the data, a player, and the sampled groups.

Modules that take seconds to import are imported when the worker is made, because the controller
imports this one and needs neither an engine nor transformers.
"""

import asyncio
import logging
import os
import time
from collections.abc import Callable, Sequence
from functools import partial
from itertools import chain
from typing import Any

import ray
import torch

from rlinf_vl.config.schema import Config
from rlinf_vl.engines.base import EngineDied
from rlinf_vl.observe.spans import flush_spans, record_spans, span
from rlinf_vl.rollout.episode.batch_stream import BatchStream
from rlinf_vl.rollout.episode.group_sampler import GroupSampler
from rlinf_vl.runtime.loading import freeze_loaded, quick_imports
from rlinf_vl.runtime.ray_process import first_report, own_process, where
from rlinf_vl.runtime.run_folder import run_folder
from rlinf_vl.transport.groups import GroupStore
from rlinf_vl.weights.buckets import Label
from rlinf_vl.weights.place import places_of
from rlinf_vl.weights.process_group import WeightGroup
from rlinf_vl.weights.sender import Snapshot
from rlinf_vl.weights.strategy import Strategy

log = logging.getLogger(__name__)


class RolloutRank(GroupSampler, BatchStream):
    """The worker itself; `rlinf_vl.rollout.pool.pool.RolloutWorker` is its Ray actor class."""

    def __init__(
        self,
        config: Config,
        model_path: str,
        device: str,
        number: int = 0,
        shared_gpu: bool = False,
        *further_gpus: Sequence[int | str],
    ) -> None:
        """
        Args:
            number: the worker's number, for traces.
            shared_gpu: whether an actor rank uses one of its GPUs, too.
            further_gpus: ids of the engine's GPUs beside those that Ray gives this process, in the
                order of its slots.
        """
        # The controller reports why a worker can't be made; Ray would print its traceback as well.
        logging.getLogger("ray._raylet").setLevel(logging.CRITICAL)
        # Before anything that takes time, so that it stands in the timeline.
        record_spans(run_folder(config), f"rollout {number}")
        own_process(device, list(chain.from_iterable(further_gpus)))
        with quick_imports():
            from rlinf_vl.rollout.episode.env_makers import scorer_of
        self.store = GroupStore()
        GroupSampler.__init__(
            self,
            config,
            model_path,
            device,
            scorer=scorer_of(config, first_report=first_report),
            store=self.store,
            first_report=first_report,
            shared_gpu=shared_gpu,
        )
        BatchStream.__init__(self)
        freeze_loaded()

    async def ready(self) -> dict[str, int]:
        """Return the number of rows of each split, once model and data are loaded.

        Raises:
            EngineDied.
        """
        # An engine may have died between its start and this call, which the run would wait for.
        if not await asyncio.to_thread(self.engine.alive, self.config.runner.heartbeat_timeout):
            raise EngineDied("its engine is dead")
        return {split: len(dataset) for split, dataset in self.datasets.items()}

    async def process(self) -> tuple[str, int]:
        """Return (node, process id) of the worker."""
        return where()

    def places(self) -> tuple[str, ...]:
        """Return the places at which this worker's engine opens the memory of actor ranks."""
        return places_of(self.device, self.config.rollout.tensor_parallel_size)

    async def reads_at(self) -> tuple[tuple[str, ...], int]:
        """Return (places, process id): who acknowledges what the engine has read, and where."""
        return self.places(), os.getpid()

    async def heartbeat(self) -> bool:
        """Return whether the engine is alive."""
        return await asyncio.to_thread(self.engine.alive, self.config.runner.heartbeat_timeout)

    async def release(self, group_ids: Sequence[str] | None) -> None:
        """Free the memory of these groups (None: all)."""
        self.store.release(group_ids)

    async def load_snapshot(self, snapshot: Snapshot) -> None:
        """Take the weights that the ranks sent last, whole."""
        # Awaited here and not in the thread: the loop answers heartbeats meanwhile.
        buckets = await asyncio.gather(*snapshot.buckets)

        def load() -> None:
            # SGLang's processes have the GPU's memory, this one has none of it.
            device = "cpu" if self.engine.reads_labels else self.device
            self.engine.load_weights(snapshot.read(buckets, device), snapshot.version)

        await self._load(load, buckets, snapshot.version)

    async def join_weight_group(self, group: WeightGroup) -> None:
        await asyncio.to_thread(self.engine.join_weight_group, group)

    async def take_weights(
        self, strategy: Strategy, offers: Sequence[ray.ObjectRef], version: int
    ) -> float:
        """Take the weights that all ranks offer or will offer: the receiving side of a strategy.

        Returns:
            The seconds for which the engine was being written.

        Raises:
            WeightsDiffer: the weights received, or those that the engine then has, differ from the
                fingerprint of their label.
        """
        all_labels = [label for offer in await asyncio.gather(*offers) for label in offer.labels]
        labels = await strategy.fetch(all_labels, self.places)
        load = partial(strategy.load, self.engine, labels, version, self.device)
        return await self._load(load, labels, version)

    async def _load(self, load: Callable[[], None], labels: Sequence[Any], version: int) -> float:
        """Load weights into the engine and check them; return the seconds that the writing took."""
        start = time.perf_counter()
        with span("take weights", version=version):
            await asyncio.to_thread(load)
        on_gpu = self.device == "cuda" and not self.engine.reads_labels
        if on_gpu:
            # The sender reuses its memory afterwards, so all copies must be complete.
            torch.cuda.synchronize()
        seconds = time.perf_counter() - start
        for label in labels:
            if isinstance(label, Label) and label.fingerprint is not None:
                fingerprint = await asyncio.to_thread(self.engine.fingerprint, label.names)
                if fingerprint is not None:
                    label.compare(fingerprint, "in the engine")
        if on_gpu:
            # A rank that shares the GPU needs the memory.
            torch.cuda.ipc_collect()
            torch.cuda.empty_cache()
        return seconds

    async def stop(self) -> None:
        self.close()
        flush_spans()
