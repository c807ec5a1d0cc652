"""Search the layouts of a config that fit some machines, and rank them by `hours.estimate_step`.

A layout is a set of changes of keys that leave the algorithm alone: placement, engine, sharding,
parallel sizes, recomputation, offloading and budget. Every layout is a config of its own, which
`validate_config` accepts and whose ledger, on every GPU and in host memory, has no problem.

The search is over products of the keys' values. It is pruned by closed forms: what does not fit
without any activations is not traced. Experts are shared out wherever ranks can, inside a machine.
Rows are cut up (`context_parallel_size`) and optimizer states kept by the CPU (`cpu_offload`) only
for placements of a kind, shared or split, where nothing fits without. Recomputation and
`reshard_after_forward` are what the ledger makes of `auto` with the smallest budget, or those that
that take the least memory, with a larger budget. The config's own layout, which `preflight --time`
estimates, and other placements of it are in the ranking.

Memory between two budgets is from traces of both (`Model.interpolates`); the layouts that are
reported are counted again from traces of their own budget (`Model.by_layers`).
"""

import copy
import itertools
import shlex
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property, partial

from rlinf_vl.config.placement import Placement, placement_of
from rlinf_vl.config.schema import Config
from rlinf_vl.config.validate import validate_config
from rlinf_vl.errors import ConfigError
from rlinf_vl.models.loading import DTYPES
from rlinf_vl.tools.memory.advice import (
    BUDGET,
    ENGINE_SHARE,
    Change,
    applied,
    min_budget,
    model_key,
)
from rlinf_vl.tools.memory.gpu_kinds import GpuKind
from rlinf_vl.tools.memory.gpu_parts import GIB
from rlinf_vl.tools.memory.host_memory import host_memory
from rlinf_vl.tools.memory.hours import FAST, SLOW, Lengths, Shares, StepTime, estimate_step
from rlinf_vl.tools.memory.ledger import Hardware, Ledger, largest_budget, ledger
from rlinf_vl.tools.memory.model import Model

PLACEMENT = "cluster.component_placement"
TP = "rollout.tensor_parallel_size"
SERVER_ARGS = "rollout.sglang.server_args"
EP = "actor.fsdp_config.expert_parallel_size"
CP = "actor.context_parallel_size"
STRATEGY = "actor.fsdp_config.strategy"
RESHARD = "actor.fsdp_config.reshard_after_forward"
CHECKPOINTING = "actor.fsdp_config.gradient_checkpointing"
OFFLOAD = "actor.enable_offload"
CPU_OFFLOAD = "actor.fsdp_config.cpu_offload"
SHARE = "rollout.gpu_memory_utilization"
#: The actor's shares of the GPUs that are tried where engines have their own.
SPLITS = (0.25, 0.5, 0.75, 0.875)
#: How a model's passes are counted: not at all, from two budgets, from the budget itself.
CLOSED_FORMS, BUDGETS, EXACT = "closed forms", "budgets", "exact"
#: GiB of host memory of a machine for each of its GPUs, where nothing else is said: about the least
#: that clouds have beside 8 × H100 (1,872 GB). Beside A100 of 80 GB it may be 144.
HOST_GIB_PER_GPU = 216


@dataclass(frozen=True)
class Layout:
    """A layout that fits.

    Attributes:
        changes: of the config.
        estimate: of a step, by the shares of a GPU that are reached.
        ledger: the memory of its GPUs; `host_bytes`: of the fullest machine.
    """

    changes: tuple[Change, ...]
    config: Config
    estimate: Callable[[Shares], StepTime]
    ledger: Ledger
    host_bytes: int

    @cached_property
    def time(self) -> StepTime:
        """The fast end of the estimated step, by which layouts are ranked."""
        return self.estimate(FAST)

    @property
    def slow(self) -> StepTime:
        """The other end."""
        return self.estimate(SLOW)

    @property
    def overrides(self) -> str:
        """The changes as a command line has them, quoted for a shell."""
        return overrides_text(self.changes)


@dataclass(frozen=True)
class Found:
    """The result of a search.

    Attributes:
        layouts: those that fit, the fastest first.
        tried: number of layouts counted.
        natural: (name, the problems of that natural layout), of those that fail.
    """

    layouts: tuple[Layout, ...]
    tried: int
    natural: tuple[tuple[str, tuple[str, ...]], ...]


def overrides_text(changes: Iterable[Change]) -> str:
    """Return changes as a command line has them, quoted for a shell."""
    return " ".join(shlex.quote(str(change)) for change in changes)


def fastest_first(layouts: Iterable[Layout]) -> list[Layout]:
    """Return layouts in the order of their ranking."""
    return sorted(layouts, key=lambda layout: layout.time.total)


def placements_on(hardware: Hardware) -> list[tuple[dict[str, str], int, bool]]:
    """Return each placement, its number of ranks, and whether engines share their GPUs."""
    gpus, nodes = hardware.gpus, hardware.nodes
    # As a mode it can be pasted: a shell and Hydra would both take keys with commas apart.
    collocated = {"actor,rollout": "collocated"}, gpus * nodes, True
    splits = _splits(nodes, "nodes ", gpus) if nodes > 1 else _splits(gpus, "", 1)
    return [collocated, *splits]


def _splits(total: int, word: str, ranks: int) -> list[tuple[dict[str, str], int, bool]]:
    """Return the placements that give the actor a share of `total` units with `ranks` slots each."""
    splits: list[tuple[dict[str, str], int, bool]] = []
    for actor in sorted({round(share * total) for share in SPLITS}):
        if 0 < actor < total:
            entries = (0, actor - 1), (actor, total - 1)
            a, b = (f"{x}-{y}" if x < y else str(x) for x, y in entries)
            splits.append(({"actor": word + a, "rollout": word + b}, actor * ranks, False))
    return splits


def host_limit(hardware: Hardware, named_gib: float | None) -> int:
    """Return the bytes of a machine's memory: what a user named, or `HOST_GIB_PER_GPU`."""
    return int((named_gib or HOST_GIB_PER_GPU * hardware.gpus) * GIB)


def fitting_memory(
    config: Config, hardware: Hardware, model: Model, placement: Placement, host_bytes: int
) -> tuple[Ledger, int] | None:
    """Return the memory of GPUs and of the host, of which there are `host_bytes`; None: no fit."""
    memory = ledger(config, hardware, model, placement)
    if memory.problems:
        return None
    needed_bytes = sum(host_memory(config, model, placement, hardware.gpu_bytes).values())
    return (memory, needed_bytes) if needed_bytes <= host_bytes else None


class Search:
    """A search for layouts of one config on one kind of cluster."""

    def __init__(
        self,
        config: Config,
        hardware: Hardware,
        kind: GpuKind,
        lengths: Lengths,
        *,
        host_bytes: int | None = None,
        models: dict[tuple[object, ...], dict[str, Model]] | None = None,
        report: Callable[[str], None] = lambda text: None,
    ) -> None:
        """Prepare the search.

        Args:
            host_bytes: memory of a machine; None: `HOST_GIB_PER_GPU` for each GPU.
            models: those of a search for the same model on other hardware, with their traces.
            report: is told what the search is doing.
        """
        self.config, self.hardware, self.kind, self.lengths = config, hardware, kind, lengths
        self.host_bytes = host_bytes or host_limit(hardware, None)
        self.report = report
        self.tried = 0
        self.models = {} if models is None else models
        # Changes are only those from the config, so that what is printed is short.
        nodes = Change("cluster.num_nodes", hardware.nodes)
        self._nodes = () if config.cluster.num_nodes == hardware.nodes else (nodes,)

    def run(self, max_layouts: int = 5) -> Found:
        """Return at most `max_layouts`, fastest first, of different placements or engine sizes."""
        natural = tuple(self._natural())
        fitting: list[Layout] = []
        unsolved = {True, False}  # kinds of placements: shared, split
        # From what costs nothing to what costs most: rows cut up, then the CPU's optimizer.
        for context, cpu_offload in ((1, False), (2, False), (4, False), (8, False), (1, True)):
            candidates = self._candidates(context, cpu_offload, unsolved)
            roomy = [(shared, changes) for shared, changes in candidates if self._has_room(changes)]
            self.report(
                f"{len(roomy)} layouts have room for weights and optimizer with {CP}={context}"
                + f" and {CPU_OFFLOAD}=true" * cpu_offload
            )
            for number, (shared, changes) in enumerate(roomy, 1):
                layouts = list(self._layouts(changes))
                unsolved -= {shared} if layouts else set()
                fitting += layouts
                if number % 20 == 0:
                    self.report(f"counted {number} of {len(roomy)}: {len(fitting)} fit")
        placements: list[tuple[Change, ...]] = [()]
        for placement, _, is_shared in placements_on(self.hardware):
            # Engines that share GPUs with ranks take turns, so nothing can be ahead.
            if not (is_shared and self.config.runner.generates_ahead):
                placements.append((Change(PLACEMENT, placement),))
        fitting += filter(None, map(self._counted, placements))
        confirmed = itertools.islice(self._confirmed(fastest_first(fitting)), max_layouts)
        return Found(tuple(fastest_first(confirmed)), self.tried, natural)

    def _natural(self) -> Iterator[tuple[str, tuple[str, ...]]]:
        """Yield the problems of the config's own layout, and of halves of the GPUs."""
        names: dict[str, tuple[Change, ...]] = {
            "as it is": (),
            "split in halves": (Change(PLACEMENT, {"actor,rollout": "disaggregated"}),),
        }
        for name, changes in names.items():
            try:
                config = self._applied(changes)
                problems = ledger(config, self.hardware, self._model(config, BUDGETS)).problems
            except (ConfigError, ValueError) as error:
                problems = (str(error),)
            if problems:
                yield name, problems

    def _candidates(
        self, context: int, cpu_offload: bool, kinds: Collection[bool]
    ) -> list[tuple[bool, tuple[Change, ...]]]:
        """Return each layout as its placement's kind and its changes, but for its budget.

        `kinds`: of placements, of which others are left out.
        """
        strategies = ("fsdp2", "hsdp") if self.hardware.nodes > 1 else ("fsdp2",)
        candidates: list[tuple[bool, tuple[Change, ...]]] = []
        for placement, ranks, is_shared in placements_on(self.hardware):
            if ranks % context or is_shared not in kinds:
                continue
            offloads = (False, True) if is_shared and not cpu_offload else (False,)
            products = itertools.product(
                self._engines(), strategies, self._expert_sizes(ranks), offloads
            )
            for engine, strategy, experts, offload in products:
                changes = (
                    Change(PLACEMENT, placement),
                    *engine,
                    Change(STRATEGY, strategy),
                    *([Change(EP, experts)] if experts else []),
                    Change(CP, context),
                    Change(CHECKPOINTING, "auto"),
                    Change(RESHARD, "auto"),
                    Change(OFFLOAD, offload),
                    Change(CPU_OFFLOAD, cpu_offload),
                    Change(SHARE, "auto"),
                )
                candidates.append((is_shared, changes))
        return candidates

    def _has_room(self, changes: tuple[Change, ...]) -> bool:
        """Return whether these changes fit without any activations, by closed forms."""
        smallest = Change(BUDGET, min_budget(self.config))
        return self._fits((*changes, smallest), CLOSED_FORMS) is not None

    def _engines(self) -> Iterator[tuple[Change, ...]]:
        """Yield the changes of engines: their size, and how experts and attention share it.

        Experts whole, where they can be, read fewer slices; attention in groups keeps no key twice.
        """
        model, sglang = self._model(self.config, CLOSED_FORMS), self.config.rollout.sglang
        mixture = model.family.mixture(model.shape)
        kv_heads = model.family.decode_state(model.shape).kv_heads
        for size in self._engine_sizes():
            changes = [Change(TP, size)]
            groups = {}
            if size > 1 and mixture is not None:
                groups["ep_size"] = size
            if size > kv_heads:
                groups["attn_dp_size"] = size // kv_heads
            if groups:
                changes.append(Change(SERVER_ARGS, sglang.server_args | groups))
            yield tuple(changes)

    def _engine_sizes(self) -> list[int]:
        """Return the numbers of GPUs of an engine: the least that hold its weights, and more."""
        if self.config.rollout.rollout_backend != "sglang":
            return [1]
        itemsize = DTYPES[self.config.rollout.model.precision].itemsize
        text = self._model(self.config, CLOSED_FORMS).shape.get_text_config()
        room = ENGINE_SHARE * self.hardware.usable
        weight_bytes = itemsize * self._model(self.config, CLOSED_FORMS).weights.total
        sizes = [
            size
            for size in (1, 2, 4, 8)
            if size <= self.hardware.gpus
            and weight_bytes / size <= room
            and text.num_attention_heads % size == 0
        ]
        return sizes[:3]

    def _expert_sizes(self, ranks: int) -> Sequence[int | None]:
        """Return the sizes of expert parallelism; [None] for a model without experts."""
        model = self._model(self.config, CLOSED_FORMS)
        mixture = model.family.mixture(model.shape)
        if mixture is None or not hasattr(self.config.actor.fsdp_config, EP.rpartition(".")[2]):
            return [None]
        # Rows of tokens should not leave a machine.
        sizes = [n for n in (1, 2, 4, 8) if n <= self.hardware.gpus]
        valid = [n for n in sizes if ranks % n == 0 and mixture.experts % n == 0]
        # Each rank would gather all experts of a layer otherwise.
        return [n for n in valid if n > 1] or valid

    def _layouts(self, changes: tuple[Change, ...]) -> Iterator[Layout]:
        """Yield the layouts of these changes with the largest budgets that fit, if any does.

        The one recomputes as little as it can with the smallest budget, the other all.
        """
        smallest = Change(BUDGET, min_budget(self.config))
        layout = self._counted((*changes, smallest))
        if layout is None:
            return
        fsdp = layout.config.actor.fsdp_config
        settled = (fsdp.gradient_checkpointing, fsdp.reshard_after_forward)
        for mode, reshard in dict.fromkeys((settled, ("full", True))):
            values = {CHECKPOINTING: mode, RESHARD: reshard}
            explicit = [Change(key, values.get(key, value)) for key, value in changes]
            layout = self._counted((*explicit, smallest))
            if layout is None:
                continue
            budget = Change(BUDGET, largest_budget(layout.ledger, self._model(layout.config)))
            if budget.value > smallest.value:
                layout = self._counted((*explicit, budget)) or layout
            yield layout

    def _fits(
        self, changes: tuple[Change, ...], passes: str, *, check: bool = False
    ) -> tuple[Model, Placement, Ledger, int] | None:
        """Return the model, placement and memory of these changes: of a GPU, and of the host.

        None if they do not fit, or are not valid. `passes`: how they are counted.
        """
        try:
            config = self._applied(changes)
            if check:
                validate_config(config, needs_machine=False)
            nodes = (self.hardware.gpus,) * self.hardware.nodes
            placement = placement_of(config, nodes)
            model = self._model(config, passes)
            fit = fitting_memory(config, self.hardware, model, placement, self.host_bytes)
        except (ConfigError, ValueError):
            return None
        return (model, placement, *fit) if fit else None

    def _counted(
        self, changes: tuple[Change, ...], passes: str = BUDGETS, *, check: bool = False
    ) -> Layout | None:
        """Return the layout of these changes; None if it does not fit, or is not valid."""
        self.tried += 1
        fit = self._fits(changes, passes, check=check)
        if fit is None:
            return None
        model, placement, memory, host_bytes = fit
        # The ledger's config has values for what is automatic.
        estimate = partial(
            estimate_step,
            memory.config,
            model,
            placement,
            self.kind,
            self.lengths,
            memory.kv_tokens,
        )
        return Layout(changes, memory.config, estimate, memory, host_bytes)

    def _confirmed(self, fitting: Sequence[Layout]) -> Iterator[Layout]:
        """Yield the first layout of each placement and size of engines, counted exactly."""
        kinds = set()
        for layout in fitting:
            kind = placement_of(layout.config, (self.hardware.gpus,) * self.hardware.nodes)
            if kind in kinds:
                continue
            self.report(f"tracing {layout.overrides}")
            confirmed = self._counted(layout.changes, EXACT, check=True)
            # The line through two traces may be a little below the third.
            if confirmed is None and layout.changes and layout.changes[-1].key == BUDGET:
                smaller = int(0.9 * layout.changes[-1].value) // 512 * 512
                budget = Change(BUDGET, max(min_budget(self.config), smaller))
                changes = (*layout.changes[:-1], budget)
                confirmed = self._counted(changes, EXACT, check=True)
            if confirmed is not None:
                kinds.add(kind)
                yield confirmed

    def _applied(self, changes: Sequence[Change]) -> Config:
        return applied(self.config, [*self._nodes, *changes])

    def _model(self, config: Config, passes: str = BUDGETS) -> Model:
        """Return the config's model; `passes`: how they are counted."""
        models = self.models.setdefault(model_key(config), {})
        if passes not in models:
            # A copy has the same modules; its traces are its own.
            models[passes] = model = copy.copy(next(iter(models.values()), None) or Model(config))
            model.interpolates = passes == BUDGETS
            model.by_layers = passes == EXACT
            model.traces = passes != CLOSED_FORMS
        return models[passes]
