"""`cluster.component_placement`: the slots (accelerators; on CPU, processes) of each component.

Slots are numbered over the whole cluster, node by node: those of node 0 come first. An entry names
slots, nodes, or a mode:

| entry | slots |
|---|---|
| `all` | every slot of the cluster |
| `0-3,6` | these |
| `nodes 0-1` | every slot of these nodes |
| `nodes all slots 0-3` | these slots of each of these nodes, numbered from 0 within a node |
| `4-7:0,8-11:1-2` | engine 0 on slots 4 to 7, engines 1 and 2 on two each |
| one of `MODES` | those of both components |

A part without `:` has engines of rollout.tensor_parallel_size slots.
"""

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate, groupby
from operator import attrgetter
from typing import Any

from rlinf_vl.config.engine_groups import check_engine_groups
from rlinf_vl.config.schema import ActorConfig, Config
from rlinf_vl.errors import ConfigError, nearest

COMPONENTS = ("actor", "rollout")
#: `single_node_split` and, on one node, `disaggregated` halve the node's slots; on several nodes,
#: `disaggregated` halves the nodes. Of unequal halves, rollout has the larger one.
MODES = ("collocated", "disaggregated", "single_node_split")
_KEY = "cluster.component_placement"
_EXAMPLE = "{actor: 0-3, rollout: 4-7}"
_ELASTIC_SHARES = (
    f"cluster.elastic_rollout: true, but {_KEY} puts actor and rollout on the same slots, where "
    f"engines and ranks take turns; give engines slots of their own, as in {_KEY}=disaggregated or "
    f"{_EXAMPLE}"
)
#: A bound above any cluster's slots: a longer range would fill the memory before a check could
#: refuse it.
_MAX_SLOTS = 100_000


@dataclass(frozen=True, slots=True)
class Placement:
    """The slots of a run.

    Attributes:
        actor: the slot of each actor rank, ascending.
        engines: the slots of each engine.
        nodes: number of slots of each node.

    Raises:
        ConfigError: the slots can't be divided evenly, or an engine can't use its slots.
    """

    actor: tuple[int, ...]
    engines: tuple[tuple[int, ...], ...]
    nodes: tuple[int, ...]

    def __post_init__(self) -> None:
        for number, engine in enumerate(self.engines):
            name = f"engine {number} (slots {ranges(engine)})"
            engine_nodes = {self.node_of(slot) for slot in engine}
            # Tensor parallelism exchanges activations in every layer, which networks are too slow
            # for.
            if len(engine_nodes) > 1:
                raise ConfigError(
                    f"{_KEY}: {name} would span nodes {ranges(engine_nodes)}; an engine's slots "
                    f"are of one node, and {described(self.nodes)}"
                )

    @property
    def rollout(self) -> tuple[int, ...]:
        """The slots of all engines."""
        return tuple(slot for engine in self.engines for slot in engine)

    @property
    def shared(self) -> bool:
        """Whether an actor rank and an engine share a slot, so that they use its memory in
        turns."""
        return bool(set(self.actor) & set(self.rollout))

    @property
    def beside_actors(self) -> bool:
        """Whether every slot of rollout has an actor rank."""
        return set(self.rollout) <= set(self.actor)

    def node_of(self, slot: int) -> int:
        """Return the number of a slot's node."""
        return next(node for node, end in enumerate(accumulate(self.nodes)) if slot < end)

    def map(self, names: Sequence[str] = ()) -> str:
        """Return a text with a line for each node: which ranks and engines use its slots.

        `names`: names of the nodes, such as their addresses.
        """
        ranks = {slot: ("actor rank", rank) for rank, slot in enumerate(self.actor)}
        engines = {
            slot: (f"engine of {len(engine)} slots" if len(engine) > 1 else "engine", number)
            for number, engine in enumerate(self.engines)
            for slot in engine
        }
        lines, free = [], []
        for node, slots in enumerate(_slots_of(self.nodes)):
            # A large cluster has many free nodes: they share one line at the end.
            if not set(slots) & {*ranks, *engines}:
                free.append(node)
                continue
            users: dict[int, list[tuple[str, int]]] = {}
            for slot in slots:
                users[slot] = [
                    component[slot] for component in (ranks, engines) if slot in component
                ]
            texts = []
            # Neighbouring slots with the same kinds of users are one entry.
            for kinds, run in groupby(
                slots, key=lambda slot, users=users: [kind for kind, _ in users[slot]]
            ):
                run_slots = list(run)
                user_texts = []
                for i, kind in enumerate(kinds):
                    numbers = {users[slot][i][1] for slot in run_slots}
                    user_texts.append(_numbered(kind, numbers))
                texts.append(f"{ranges(run_slots)}: {' and '.join(user_texts) or 'free'}")
            name = f" ({names[node]})" if names else ""
            lines.append(f"node {node}{name}: slots {'; '.join(texts)}")
        return "\n".join(
            [*lines, *([f"free: node{'s' * (len(free) > 1)} {ranges(free)}"] if free else [])]
        )


def _check_ranks(ranks: int, actor: ActorConfig) -> None:
    """Raise ConfigError unless ranks that share rows, or share out experts, divide the actor's."""
    for key in ("context_parallel_size", "fsdp_config.expert_parallel_size"):
        # A size below 1 is a problem of its own limit.
        if ranks % (size := max(1, attrgetter(key)(actor))):
            raise ConfigError(
                f"actor.{key}: {size} does not divide the {ranks} slots of actor in {_KEY}"
            )


def placement_of(config: Config, nodes: Sequence[int]) -> Placement:
    """Return a run's placement on a cluster. `nodes`: number of slots of each node.

    Raises:
        ConfigError: an entry names slots or nodes that the cluster does not have; see also
            `parse_placement` and `Placement`.
    """
    named = parse_placement(config.cluster.component_placement)
    tp = config.rollout.tensor_parallel_size
    if not any(nodes):
        raise ConfigError(
            f"{_KEY}: no slots: the cluster has none of cluster.device; set that to cpu, or start "
            "Ray where there are GPUs"
        )
    # A mode is given to both components or to none (`parse_placement`), so either one tells it.
    if (mode := named["actor"].text) in MODES:
        actor, rollout = _halves(mode, nodes, tp, config.actor.rank_multiple)
        _check_ranks(len(actor), config.actor)
        check_engine_groups(config, [tp])
        return Placement(actor, tuple(_engines(rollout, None, tp, nodes)), tuple(nodes))
    ranks: list[int] = []
    for part in named["actor"].parts:
        ranks += _slots("actor", named["actor"], part, nodes)
    engines: list[tuple[int, ...]] = []
    for part in named["rollout"].parts:
        engines += _engines(
            _slots("rollout", named["rollout"], part, nodes), part.processes, tp, nodes
        )
    # Ranks follow the slots' order, whatever the order of the parts.
    _check_ranks(len(ranks), config.actor)
    placement = Placement(tuple(sorted(ranks)), tuple(engines), tuple(nodes))
    if config.cluster.elastic_rollout and placement.shared:
        raise ConfigError(_ELASTIC_SHARES)
    check_engine_groups(config, map(len, engines))
    if config.rollout.rollout_backend == "torch" and (
        large := [engine for engine in engines if len(engine) > 1]
    ):
        raise ConfigError(
            f"{_KEY}: an engine with slots {ranges(large[0])}, but rollout.rollout_backend is "
            "torch, whose engines have one; set sglang, or as many engines as slots"
        )
    return placement


@dataclass(frozen=True, slots=True)
class _Part:
    """A part of an entry, between two commas: slots or nodes (None: all), and the number of engines
    on them (None: not given)."""

    numbers: tuple[int, ...] | None
    processes: int | None = None


@dataclass(frozen=True, slots=True)
class Entry:
    """The placement of one component: a mode, or parts that name slots or nodes.

    Attributes:
        text: the entry as written.
        parts: its parts; none for a mode.
        of_nodes: the parts name nodes.
        within: slots of each named node; None: all of them.
    """

    text: str
    parts: tuple[_Part, ...] = ()
    of_nodes: bool = False
    within: tuple[int, ...] | None = None

    @property
    def slots(self) -> set[int] | None:
        """The slots that the entry names by number; None if they depend on the cluster."""
        if self.of_nodes or any(part.numbers is None for part in self.parts) or not self.parts:
            return None
        return {slot for part in self.parts for slot in part.numbers or ()}


def parse_placement(component_placement: Mapping[str, Any]) -> dict[str, Entry]:
    """Return the entry of each component. An entry set to null is dropped.

    Args:
        component_placement: comma-separated component names → an entry, as in the table above.

    Raises:
        ConfigError: an unknown, repeated or missing component; a malformed entry.
    """
    entries: dict[str, Entry] = {}
    keys: dict[str, str] = {}  # component → the key of its entry
    for names, value in component_placement.items():
        # A key that YAML reads as a number is an unknown component and no crash.
        for component in (name.strip() for name in str(names).split(",") if value is not None):
            if component not in COMPONENTS:
                hint = nearest(component, COMPONENTS)
                raise ConfigError(
                    f"{_KEY}: unknown component {component!r}; components are actor and "
                    f"rollout;{hint}"
                )
            if component in keys:
                both = f"by {keys[component]!r} and by {names!r}"
                raise ConfigError(
                    f"{_KEY}: '{component}' is placed twice, {both}; set one of the two to null"
                )
            keys[component] = names
            entries[component] = _parse_entry(f"{_KEY}: '{names}: {value}'", str(value))
    for component in COMPONENTS:
        if component not in entries:
            raise ConfigError(
                f"{_KEY}: {dict(component_placement)} has no place for '{component}'; for example "
                f"collocated, {{actor: all, rollout: all}}, or {_EXAMPLE}"
            )
    texts = {component: entries[component].text for component in COMPONENTS}
    if any(text in MODES for text in texts.values()) and len(set(texts.values())) > 1:
        raise ConfigError(
            f"{_KEY}: {dict(component_placement)} gives a mode to one component; a mode places "
            f"both, as in {_KEY}={MODES[1]}"
        )
    return {component: entries[component] for component in COMPONENTS}


def check_placement(config: Config) -> None:
    """Raise ConfigError if the placement is wrong on every cluster."""
    named = parse_placement(config.cluster.component_placement)
    if config.rollout.rollout_backend == "sglang" and all(
        part.processes is None for part in named["rollout"].parts
    ):
        check_engine_groups(config, [max(1, config.rollout.tensor_parallel_size)])
    if (ranks := named["actor"].slots) is not None:
        _check_ranks(len(ranks), config.actor)
    if any(part.processes not in (None, len(part.numbers or ())) for part in named["actor"].parts):
        raise ConfigError(
            f"{_KEY}: 'actor: {named['actor'].text}' shares slots out; each actor rank has one: "
            "leave ':…' out"
        )
    if config.cluster.elastic_rollout and shares_slots(config.cluster.component_placement):
        raise ConfigError(_ELASTIC_SHARES)


def slots_named(config: Config) -> int:
    """Return the number of slots that the placement needs on one node; `all` needs none.

    A private CPU cluster gets so many.
    """
    named = parse_placement(config.cluster.component_placement)
    if named["actor"].text in MODES[1:]:
        # Each half needs room for one engine, or for one set of ranks that share rows.
        return config.rollout.tensor_parallel_size + config.actor.rank_multiple
    highest = [max(entry.slots or entry.within or (-1,)) for entry in named.values()]
    return 1 + max(highest)


def shares_slots(component_placement: Mapping[str, Any]) -> bool:
    """Return `Placement.shared` as far as it is known without the cluster.

    Slots named by number and slots named by node count as different.
    """
    actor, rollout = parse_placement(component_placement).values()
    if actor.text in MODES:
        return actor.text == MODES[0]
    # Every slot is a slot of the other component, too, whatever that one names.
    if "all" in (actor.text, rollout.text):
        return True
    if actor.slots is not None and rollout.slots is not None:
        return bool(actor.slots & rollout.slots)
    # Slots by number and slots by node can't be compared without the cluster.
    if not (actor.of_nodes and rollout.of_nodes):
        return False
    actor_nodes = [part.numbers for part in actor.parts]
    rollout_nodes = [part.numbers for part in rollout.parts]
    share_node = any(
        a is None or b is None or set(a) & set(b) for a in actor_nodes for b in rollout_nodes
    )
    return share_node and (
        None in (actor.within, rollout.within)
        or bool(set(actor.within or ()) & set(rollout.within or ()))
    )


def described(nodes: Sequence[int]) -> str:
    """Return a sentence about the slots of a cluster."""
    if len(nodes) == 1:
        return f"the cluster has one node with slots {ranges(range(nodes[0]))}"
    if len(set(nodes)) == 1 and len(nodes) > 4:
        return f"the cluster has {len(nodes)} nodes of {nodes[0]} slots each, numbered 0 to {sum(nodes) - 1}"
    each = ", ".join(
        f"node {node} with slots {ranges(slots)}" for node, slots in enumerate(_slots_of(nodes))
    )
    return f"the cluster has {len(nodes)} nodes: {each}"


def ranges(numbers: Iterable[int]) -> str:
    """Return numbers as text, such as "0-3,6"."""
    # Consecutive numbers differ from their index by the same amount.
    runs = [
        list(run)
        for _, run in groupby(enumerate(sorted(numbers)), key=lambda pair: pair[1] - pair[0])
    ]
    return ",".join(f"{run[0][1]}-{run[-1][1]}" if len(run) > 1 else str(run[0][1]) for run in runs)


def _numbered(kind: str, numbers: set[int]) -> str:
    """Return a kind with its numbers, such as "engines 0-3 of 2 slots"."""
    noun, of, size = kind.partition(" of ")
    return f"{noun}{'s' * (len(numbers) > 1)} {ranges(numbers)}{of}{size}"


def _slots_of(nodes: Sequence[int]) -> list[range]:
    """Return the slots of each node."""
    return [range(end - size, end) for end, size in zip(accumulate(nodes), nodes, strict=True)]


def _halves(
    mode: str, nodes: Sequence[int], tp: int, multiple: int
) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Return the slots of actor, a multiple, and of rollout in a mode."""
    n = sum(nodes)
    if mode == "collocated":
        return tuple(range(n)), tuple(range(n))
    if len(nodes) > 1:
        if mode == "single_node_split":
            hint = (
                "write disaggregated, or {actor: nodes all slots 0-3, rollout: nodes all slots 4-7}"
            )
            raise ConfigError(f"{_KEY}: {mode} is for one node, and {described(nodes)}; {hint}")
        # Whole nodes, since no engine may span two.
        boundary = sum(nodes[: len(nodes) // 2])
        return tuple(range(boundary)), tuple(range(boundary, n))
    ranks = [ranks for ranks in range(multiple, n, multiple) if (n - ranks) % tp == 0]
    if not ranks:
        raise ConfigError(
            f"{_KEY}: {mode} finds no halves: {described(nodes)}; actor takes {multiple} or a "
            "multiple (actor.context_parallel_size, actor.fsdp_config.expert_parallel_size), "
            f"rollout {tp} or a multiple "
            f"(rollout.tensor_parallel_size); name the slots, as in {_EXAMPLE}, or write collocated"
        )
    # Take the most equal division; of two, the one with fewer ranks.
    actor_slots = min(ranks, key=lambda ranks: (abs(n - 2 * ranks), ranks))
    return tuple(range(actor_slots)), tuple(range(actor_slots, n))


def _slots(component: str, entry: Entry, part: _Part, nodes: Sequence[int]) -> list[int]:
    """Return the slots of a part of an entry."""
    node_slots = _slots_of(nodes)
    if not entry.of_nodes:
        chosen = list(range(sum(nodes)) if part.numbers is None else part.numbers)
        if max(chosen) >= sum(nodes):
            raise ConfigError(
                f"{_KEY}: '{component}' wants slot {max(chosen)}, but {described(nodes)}"
            )
        return chosen
    chosen = []
    # Slots are counted within a node here, and over the cluster everywhere else.
    for node in range(len(nodes)) if part.numbers is None else part.numbers:
        if node >= len(nodes):
            raise ConfigError(
                f"{_KEY}: '{component}' wants node {node}, numbered from 0, but {described(nodes)}"
            )
        if entry.within and entry.within[-1] >= nodes[node]:
            raise ConfigError(
                f"{_KEY}: '{component}' wants slot {entry.within[-1]} of node {node}, which has "
                f"{nodes[node]}, numbered from 0"
            )
        chosen += [node_slots[node][slot] for slot in entry.within or range(nodes[node])]
    return chosen


def _engines(
    slots: Sequence[int], processes: int | None, tp: int, nodes: Sequence[int]
) -> Iterator[tuple[int, ...]]:
    """Yield the slots of each engine of a part: `processes` engines, or engines of `tp` slots, node
    by node."""
    if processes is not None:
        if len(slots) % processes:
            raise ConfigError(
                f"{_KEY}: {processes} engines can't share {len(slots)} slots ({ranges(slots)}) "
                "evenly; each has one or more of its own"
            )
        size = len(slots) // processes
        yield from (tuple(slots[i : i + size]) for i in range(0, len(slots), size))
        return
    for node, node_slots in enumerate(_slots_of(nodes)):
        # Node by node, because an engine can't span nodes.
        part_slots = sorted(set(slots) & set(node_slots))
        if len(part_slots) % tp:
            where = f" on node {node}" if len(nodes) > 1 else ""
            raise ConfigError(
                f"rollout.tensor_parallel_size: {tp} does not divide the {len(part_slots)} slots "
                f"of rollout{where} in {_KEY} ({ranges(part_slots)}); lower it, or give each "
                "engine its slots, as in '4-7:0,8-9:1'"
            )
        yield from (tuple(part_slots[i : i + tp]) for i in range(0, len(part_slots), tp))


def _parse_entry(entry: str, written: str) -> Entry:
    """Parse an entry. `entry`: key and value as errors quote them; `written`: the value."""
    text = " ".join(written.split())
    if text in MODES:
        return Entry(text)
    named, slots, within = text.partition(" slots ")
    of_nodes = re.match("nodes? ", named)
    # Engines behind ':' are those of one part; parts without it are merged below.
    parts = list[_Part]()
    for part in named[of_nodes.end() if of_nodes else 0 :].replace(" ", "").split(","):
        numbers, colon, processes = part.partition(":")
        engine_numbers = _numbers(entry, processes) if colon else ()
        # Engines are numbered from 0 in the order of the parts.
        first = sum(part.processes or 0 for part in parts)
        if engine_numbers and engine_numbers != tuple(range(first, first + len(engine_numbers))):
            raise ConfigError(
                f"{entry}: {processes!r} behind ':' numbers engines; they count on from {first}, "
                "each once"
            )
        parts.append(
            _Part(
                None if numbers == "all" else _numbers(entry, numbers), len(engine_numbers) or None
            )
        )
    chosen = [number for part in parts for number in part.numbers or ()]
    if len(set(chosen)) < len(chosen) or (
        len(parts) > 1 and any(part.numbers is None for part in parts)
    ):
        raise ConfigError(f"{entry} names a {'node' if of_nodes else 'slot'} twice; name each once")
    plain = [part for part in parts if part.processes is None and part.numbers is not None]
    if len(plain) > 1:  # one list of slots, whatever engines are made of it
        parts = [part for part in parts if part not in plain]
        parts.append(
            _Part(tuple(sorted(number for part in plain for number in part.numbers or ())))
        )
    return Entry(
        text,
        tuple(parts),
        bool(of_nodes),
        _numbers(entry, within.replace(" ", "")) if slots else None,
    )


def _numbers(entry: str, text: str) -> tuple[int, ...]:
    """Return the numbers, ascending, of ranges such as "0-3,6"."""
    numbers: set[int] = set()
    for part in text.split(","):
        match = re.fullmatch(r"(\d+)(?:-(\d+))?", part)
        first, last = (int(match[1]), int(match[2] or match[1])) if match else (0, -1)
        if last < first:
            raise ConfigError(
                f"{entry} isn't all, a slot, or ranges such as 0-3 or 0-1,4; nor nodes ('nodes "
                f"0-1', 'nodes all slots 0-3'), nor one of {', '.join(MODES)}"
            )
        # Before the range is made: it would fill the memory.
        if last >= _MAX_SLOTS:
            raise ConfigError(
                f"{entry} names a slot that no cluster has; slots are numbered from 0"
            )
        # A slot that is named twice is a typing error in one of the ranges, and not harmless.
        if numbers & set(range(first, last + 1)):
            raise ConfigError(f"{entry} names a slot twice; name each once")
        numbers |= set(range(first, last + 1))
    return tuple(sorted(numbers))
