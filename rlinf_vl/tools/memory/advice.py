"""Advice for a config that does not fit: every change is tried on a copy of the config.

A combination of changes is given only if `validate_config` accepts the copy and the ledger of the
copy has no problem. Small combinations are tried first. Where none fits, the advice is the smallest
hardware that fits, and adapters.
"""

import copy
import itertools
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import reduce
from typing import Any, NamedTuple

from rlinf_vl.config.placement import MODES, Placement, shares_slots
from rlinf_vl.config.schema import Config
from rlinf_vl.config.validate import validate_config
from rlinf_vl.errors import ConfigError
from rlinf_vl.models.loading import DTYPES
from rlinf_vl.tools.memory.gpu_parts import GIB
from rlinf_vl.tools.memory.ledger import Hardware, Ledger, ledger
from rlinf_vl.tools.memory.model import Model, expert_parallel_size
from rlinf_vl.weights import FALLBACK

#: Sizes of cards in GB, as printed on them, that a search for hardware goes through.
CARDS = (24, 48, 80)
#: (GPUs of a machine, machines), the fewest first.
CLUSTERS = [(1, 1), (2, 1), (4, 1), (8, 1), (8, 2), (8, 4), (8, 8), (8, 16)]
BUDGET = "runner.max_tokens_per_mbs"
CPU_OFFLOAD = "actor.fsdp_config.cpu_offload"
#: The share of a card that an engine's weights may take. The remainder is for KV cache, CUDA graphs
#: and workspace.
ENGINE_SHARE = 0.75


class Change(NamedTuple):
    """An override of one config key."""

    key: str
    value: Any

    def __str__(self) -> str:
        if isinstance(self.value, bool):
            return f"{self.key}={str(self.value).lower()}"
        if isinstance(self.value, float):
            return f"{self.key}={self.value:g}"
        if isinstance(self.value, dict):
            entries = ", ".join(f"{name}: {value}" for name, value in self.value.items())
            is_mode = len(self.value) == 1 and next(iter(self.value.values())) in MODES
            return f"{self.key}=" + (
                next(iter(self.value.values())) if is_mode else f"{{{entries}}}"
            )
        return f"{self.key}={self.value}"


LORA = (Change("actor.model.is_lora", True),)
QLORA = LORA + (Change("actor.model.lora.quantization", "nf4"),)
#: bitsandbytes can't quantize stacked experts.
NO_EXPERTS = Change("actor.model.lora.exclude_modules", [".*experts.*"])
#: Changes that leave the algorithm alone. Among combinations of one size, those of earlier changes
#: are tried first.
MEMORY_CHANGES = [
    Change("rollout.gpu_memory_utilization", "auto"),
    Change(BUDGET, None),  # the largest that fits
    Change("actor.enable_offload", True),
    Change("actor.fsdp_config.gradient_checkpointing", "full"),
    Change("actor.fsdp_config.reshard_after_forward", True),
    Change("rollout.max_running_requests", 64),
    Change("rollout.weight_sync", FALLBACK),  # through host memory, bucket by bucket
    Change(CPU_OFFLOAD, True),
]


@dataclass(frozen=True)
class Fit:
    """The changes with which a config fits on some hardware, and its ledger with them."""

    changes: tuple[Change, ...]
    ledger: Ledger

    @property
    def overrides(self) -> str:
        """The changes as a command line has them; "" without any."""
        return " ".join(map(str, self.changes))

    def __str__(self) -> str:
        return _peak_text(self.ledger)


class Advisor:
    """A search for changes of one config; all searches share the models and their traces."""

    def __init__(self, config: Config, model: Model) -> None:
        self.config = config
        self._models = {model_key(config): model}
        self._path = model.path

    def smallest_change(
        self,
        hardware: Hardware,
        base: Sequence[Change] = (),
        placement: Placement | None = None,
        *,
        cpu_offload: bool | None = None,
        exact: bool = True,
    ) -> Fit | None:
        """Return the smallest combination of changes beside `base` that fits on `hardware`.

        None where none does. `actor.fsdp_config.cpu_offload` comes last whatever the size: with it
        the CPU takes each optimizer step.

        Args:
            placement: of ranks and engines, as given to `ledger`.
            cpu_offload: whether only combinations with it, or without it, are tried; None: both.
            exact: find the largest budget, not just the smallest one, where the budget is changed.
        """
        if fit := self._try(base, hardware, placement):
            return fit
        base_config = applied(self.config, base)
        useful_changes = [change for change in MEMORY_CHANGES if _lowers(base_config, change)]
        gpu_changes = [change for change in useful_changes if change.key != CPU_OFFLOAD]
        offload_changes = [change for change in useful_changes if change.key == CPU_OFFLOAD]
        if base_config.actor.enable_offload:  # the two exclude each other
            offload_changes.append(Change("actor.enable_offload", False))
        gpu_changes_beside_offload = [
            change for change in gpu_changes if change.key != "actor.enable_offload"
        ]
        # Of each search: changes in every combination, and candidates for the combinations.
        searches = [] if cpu_offload else [([], gpu_changes)]
        if (
            offload_changes[:1]
            and offload_changes[0].key == CPU_OFFLOAD
            and cpu_offload is not False
        ):
            searches.append((offload_changes, gpu_changes_beside_offload))
        for last_changes, candidates in searches:
            # Each change only lowers memory, so where all together lower it too little, so does any
            # combination of them.
            if self._try([*base, *candidates, *last_changes], hardware, placement) is None:
                continue
            for combination in _by_size(candidates):
                if fit := self._try([*base, *combination, *last_changes], hardware, placement):
                    return self._with_largest_budget(fit, hardware, placement) if exact else fit
        return None

    def smallest_hardware(
        self, card: int, base: Sequence[Change] = (), *, exact: bool = True
    ) -> Fit | None:
        """Return how the config fits on the fewest cards of `card` GB; None where it fits on none.

        `CLUSTERS` are tried. `actor.fsdp_config.cpu_offload` is set only where no cluster holds the
        config without it.
        """
        for cpu_offload, (gpus, nodes) in itertools.product((False, True), CLUSTERS):
            hardware = Hardware.named(gpus, card, nodes)
            for placement_changes in self._placements(card, gpus * nodes):
                changes = [*base, *placement_changes]
                if fit := self.smallest_change(
                    hardware, changes, cpu_offload=cpu_offload, exact=exact
                ):
                    return fit
        return None

    def adapters(self, hardware: Hardware, placement: Placement | None = None) -> Fit | None:
        """Return how LoRA, or else QLoRA, fits on `hardware`; None where neither does."""
        for base in (LORA, self.qlora):
            if not self.config.actor.model.is_lora and (
                fit := self.smallest_change(hardware, base, placement)
            ):
                return fit
        return None

    @property
    def qlora(self) -> tuple[Change, ...]:
        """The changes for QLoRA, without adapters of experts in a mixture of them."""
        (model, *_) = self._models.values()
        return (*QLORA, NO_EXPERTS) if model.weights.experts else QLORA

    def _placements(self, card: int, slots: int) -> Iterator[tuple[Change, ...]]:
        """Yield changes of the placement: none, and engines of several GPUs apart from the trainer.

        None is left out where one GPU can't hold an engine.
        """
        rollout = self.config.rollout
        (model, *_) = self._models.values()
        bytes_per_weight = DTYPES[rollout.model.precision].itemsize
        cards_for_weights = (
            model.weights.total * bytes_per_weight / (ENGINE_SHARE * Hardware.named(1, card).usable)
        )
        can_split = (
            shares_slots(self.config.cluster.component_placement)
            and rollout.rollout_backend == "sglang"
        )
        if cards_for_weights <= 1 or not can_split:
            yield ()
        smallest_size = next((size for size in (1, 2, 4) if size >= cards_for_weights), 8)
        for size in (smallest_size, 2 * smallest_size) if can_split else ():
            if 2 * size <= slots and size <= 8:
                disaggregated = Change(
                    "cluster.component_placement", {"actor,rollout": "disaggregated"}
                )
                yield (
                    (disaggregated, Change("rollout.tensor_parallel_size", size))
                    if size > 1
                    else (disaggregated,)
                )

    def _model(self, config: Config) -> Model:
        # Configs that differ in other keys share a model: its traces take seconds.
        key = model_key(config)
        if key not in self._models:
            self._models[key] = Model(config, self._path)
        return self._models[key]

    def ledger_with(
        self, changes: Sequence[Change], hardware: Hardware, placement: Placement | None = None
    ) -> Ledger | None:
        """Return the ledger of the config with these changes; None where it is not valid."""
        config = applied(self.config, changes)
        try:
            validate_config(config, needs_machine=False)
            return ledger(config, hardware, self._model(config), placement)
        except (ConfigError, ValueError):  # ValueError: this model can't have the adapters
            return None

    def _try(
        self, changes: Sequence[Change], hardware: Hardware, placement: Placement | None
    ) -> Fit | None:
        """Return the fit of the config with these changes.

        None if it does not fit, or is not valid.
        """
        memory_ledger = self.ledger_with(changes, hardware, placement)
        if memory_ledger is None or memory_ledger.problems:
            return None
        budget = memory_ledger.config.runner.max_tokens_per_mbs
        return Fit(
            tuple(Change(key, budget if key == BUDGET else value) for key, value in changes),
            memory_ledger,
        )

    def _with_largest_budget(
        self, fit: Fit, hardware: Hardware, placement: Placement | None
    ) -> Fit:
        """Return the fit with the largest budget that fits, to a sixth.

        A fit whose budget is not changed is returned as it is.
        """
        if all(change.key != BUDGET for change in fit.changes):
            return fit
        low, high = (
            fit.ledger.config.runner.max_tokens_per_mbs,
            self.config.runner.max_tokens_per_mbs,
        )
        # Each try traces the model, so the search ends within a sixth.
        while high - low > max(512, low // 6):
            middle = (low + high) // 1024 * 512
            changes = [
                change._replace(value=middle) if change.key == BUDGET else change
                for change in fit.changes
            ]
            if larger := self._try(changes, hardware, placement):
                low, fit = middle, larger
            else:
                high = middle
        return fit


def advise(
    memory_ledger: Ledger,
    model: Model,
    placement: Placement | None = None,
    *,
    elsewhere: bool = True,
) -> list[str]:
    """Return advice on a ledger with problems, a line each.

    Args:
        placement: of ranks and engines, as given to `ledger`.
        elsewhere: look for other hardware and adapters, too, where no change makes it fit. That
            takes minutes at worst.
    """
    advisor, hardware = Advisor(memory_ledger.config, model), memory_ledger.hardware
    if fit := advisor.smallest_change(hardware, placement=placement):
        lines = [f"set {fit.overrides}: then {_gains(memory_ledger, fit.ledger)}"]
        if elsewhere and any(change.key == CPU_OFFLOAD for change in fit.changes):
            lines[0] += "; the CPU then takes each optimizer step, which is slow"
            lines += _adapters(advisor, hardware, placement)
        return lines
    lines = [f"no setting makes it fit on {hardware}"]
    if not elsewhere:
        return [f"{lines[0]}; 'rlinf-vl preflight' says the smallest hardware that fits"]
    hardware_lines = []
    for card in CARDS:
        if fit := advisor.smallest_hardware(card):
            hardware_lines.append(f"{_cards(fit.ledger.hardware, card)} {_how(fit)}")
    if hardware_lines:
        lines.append(f"smallest that fits: {'; or '.join(hardware_lines)}")
    return lines + _adapters(advisor, hardware, placement)


def _adapters(advisor: Advisor, hardware: Hardware, placement: Placement | None) -> list[str]:
    """Return a line of advice about adapters; none where they don't fit either."""
    fit = advisor.adapters(hardware, placement)
    return [f"or train adapters on what there is: {_how(fit)}"] if fit else []


def model_key(config: Config) -> tuple[object, ...]:
    """Return the keys that decide on a config's `Model`, among those that are changed here."""
    model = config.actor.model
    lora = (model.lora.quantization, *model.lora.exclude_modules) if model.is_lora else ()
    return (expert_parallel_size(config) > 1, model.is_lora, *lora)


def _by_size(changes: Sequence[Change]) -> Iterator[tuple[Change, ...]]:
    """Yield the combinations of the changes, the smallest first, the empty one included."""
    for size in range(len(changes) + 1):
        yield from itertools.combinations(changes, size)


def _value(config: Config, key: str) -> Any:
    return reduce(getattr, key.split("."), config)


def applied(config: Config, changes: Iterable[Change]) -> Config:
    """Return a copy with the changes; a budget without a value is the smallest."""
    changed = copy.deepcopy(config)
    for key, value in changes:
        *sections, leaf = key.split(".")
        if key == BUDGET and value is None:
            value = min_budget(config)
        setattr(reduce(getattr, sections, changed), leaf, copy.deepcopy(value))
    return changed


def min_budget(config: Config) -> int:
    """Return the smallest `runner.max_tokens_per_mbs` that holds the longest trajectory.

    It is a multiple of 512.
    """
    trajectories = 1 if config.runner.enable_dynamic_batch_size else config.actor.micro_batch_size
    return -(-trajectories * config.runner.seq_length // 512) * 512


def _lowers(config: Config, change: Change) -> bool:
    """Return whether the change changes the config, and lowers its memory."""
    value = _value(config, change.key)
    if change.key == BUDGET:
        return value > min_budget(config)
    if value == "auto" and change.key.startswith("actor.fsdp_config."):
        return False  # the ledger settles it, with the smallest value if need be
    if isinstance(change.value, bool | str):
        return value != change.value
    return value > change.value


def _gains(old_ledger: Ledger, new_ledger: Ledger) -> str:
    """Describe the memory of each phase of a problem after the changes, and the fullest phase."""
    gains: list[str] = []
    for old_gpu, new_gpu in zip(old_ledger.gpus, new_ledger.gpus, strict=True):
        for phase, parts in old_gpu.phases.items():
            old_total, new_total = sum(parts.values()), sum(new_gpu.phases[phase].values())
            if any(
                text.startswith(f"{phase} needs") and old_gpu.role in text
                for text in old_ledger.problems
            ):
                gains.append(
                    f"{phase} takes {new_total / GIB:.1f} instead of {old_total / GIB:.1f} GiB"
                )
    return ", ".join([*gains, _peak_text(new_ledger)])


def _peak_text(memory_ledger: Ledger) -> str:
    """Describe the fullest phase of all GPUs."""
    fullest = max(memory_ledger.gpus, key=lambda gpu: gpu.peak)
    return fullest.peak_text(memory_ledger.hardware.usable)


def _cards(hardware: Hardware, card: int) -> str:
    machines = f"{hardware.nodes} × " if hardware.nodes > 1 else ""
    return f"{machines}{hardware.gpus} × {card} GB"


def _how(fit: Fit) -> str:
    return f"with {fit.overrides} ({fit})" if fit.changes else f"as it is ({fit})"
