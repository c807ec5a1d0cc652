"""Count the bytes that the trainer's ranks exchange, by closed forms of FSDP2 and the exchanges.

A collective's bytes are those of its larger tensor on one rank: the output of an all-gather, the
input of a reduce-scatter, an all-reduce or an all-to-all. Between experts they are the mean of the
ranks: busy experts get more rows than their rank sends. A test counts the same inside
torch.distributed, in processes that train.

| collective | over | for each | bytes |
|---|---|---|---|
| all-gather | `shard` ranks | unit and pass; with resharding, backward too | its padded weights, in `param_dtype` |
| reduce-scatter | `shard` ranks | unit with trained weights | its padded weights, in `reduce_dtype` |
| all-reduce | `replicas` ranks | unit with trained weights (hsdp) | a rank's part of it, in `reduce_dtype` |
| all-to-all | `context` ranks | attention of a layer, and its backward | queries, keys and values of a rank's tokens; their output |
| all-to-all | `expert` ranks | mixture of a layer, and its backward | rows sent to experts; their results |
| all-to-all | `expert` ranks | mixture of a layer | the number of rows of each expert, in int64 |

With expert parallelism a rank's own experts are gathered and reduced over the `shard / expert` ranks
that have the same ones.
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from rlinf_vl.models.context import kv_heads_by_rank
from rlinf_vl.models.shapes import Mixture
from rlinf_vl.preflight.model import Weights

#: Bytes of the number of rows that an expert gets.
COUNT_BYTES = 8


@dataclass(frozen=True, slots=True)
class Grid:
    """The arrangement of the actor's ranks.

    Attributes:
        ranks: all of them; `shard`: ranks that share the weights.
        context: ranks that share each row; `expert`: ranks that share the experts.
        per_node: ranks on one machine.
    """

    ranks: int
    shard: int
    context: int = 1
    expert: int = 1
    per_node: int = 8

    @property
    def replicas(self) -> int:
        """Ranks that have the same part of the weights."""
        return self.ranks // self.shard


@dataclass(frozen=True, slots=True)
class Exchange:
    """Collectives of one kind over one group of ranks.

    Attributes:
        kind: all-gather, reduce-scatter, all-reduce or all-to-all.
        ranks: size of the group; `stride`: distance of neighbours in it.
        calls: number of collectives; `nbytes`: of all of them together.
    """

    kind: str
    ranks: int
    stride: int
    calls: int
    nbytes: int

    def crosses_nodes(self, grid: Grid) -> bool:
        """Return whether the group has ranks of several machines."""
        return (self.ranks - 1) * self.stride >= grid.per_node


def weight_exchanges(
    weights: Weights,
    grid: Grid,
    *,
    parts: Iterable[str],
    param_bytes: int,
    reduce_bytes: int,
    gathers: int,
    root_gathers: int = 1,
    reduces: bool = True,
) -> Iterator[Exchange]:
    """Yield the exchanges of weights and gradients in one pass.

    Args:
        parts: the parts of the model that run.
        gathers: times that a unit other than the root is gathered: 2 for forward and backward with
            resharding, 1 without or for a forward alone, 0 where it is gathered already.
        root_gathers: times that the root is gathered.
        reduces: whether gradients are reduced.
    """
    # Without expert parallelism a unit's experts are gathered with its other weights.
    groups = [((False, True), grid.shard, 1)]
    if grid.expert > 1:
        groups = [
            ((False,), grid.shard, 1),
            ((True,), grid.shard // grid.expert, grid.expert),
        ]
    for kinds, ranks, stride in groups:
        n_gathers = n_reduces = gathered = reduced = 0
        for part in parts:
            times = root_gathers if part == "root" else gathers
            n_units, size = weights.padded(part, ranks, kinds, expert_ranks=stride)
            n_gathers, gathered = n_gathers + times * n_units, gathered + times * size
            n_units, size = weights.padded(part, ranks, kinds, trained=True, expert_ranks=stride)
            n_reduces, reduced = n_reduces + n_units, reduced + size
        if ranks > 1 and gathered:
            yield Exchange("all-gather", ranks, stride, n_gathers, param_bytes * gathered)
        if not reduces or not reduced:
            continue
        if ranks > 1:
            yield Exchange("reduce-scatter", ranks, stride, n_reduces, reduce_bytes * reduced)
        if grid.replicas > 1:
            yield Exchange(
                "all-reduce", grid.replicas, grid.shard, n_reduces, reduce_bytes * reduced // ranks
            )


def context_exchanges(
    grid: Grid,
    *,
    tokens: int,
    layers: int,
    heads: int,
    kv_heads: int,
    head_dim: int,
    itemsize: int,
    passes: int,
) -> Iterator[Exchange]:
    """Yield the exchanges of attention between ranks that share rows.

    Args:
        tokens: a rank's tokens.
        passes: 1 for a forward; with backward 2, and with layers that are computed again 3.
    """
    if grid.context == 1:
        return
    kv = len(kv_heads_by_rank(heads, kv_heads, grid.context))
    layer_bytes = tokens * head_dim * itemsize * ((heads + 2 * kv) + heads)
    calls = passes * layers
    yield Exchange("all-to-all", grid.context, 1, 2 * calls, calls * layer_bytes)


def expert_exchanges(
    grid: Grid,
    mixture: Mixture | None,
    *,
    tokens: int,
    hidden: int,
    itemsize: int,
    passes: int,
) -> Iterator[Exchange]:
    """Yield the exchanges of tokens between ranks that share experts.

    Each token goes to `top_k` experts, and their results come back. Before them, in each forward,
    go the numbers of rows. `passes`: as above.
    """
    if mixture is None or grid.expert == 1:
        return
    calls = passes * len(mixture.layers)
    exchange_bytes = tokens * mixture.top_k * hidden * itemsize
    yield Exchange("all-to-all", grid.expert, 1, 2 * calls, 2 * calls * exchange_bytes)
    forwards = max(1, passes - 1) * len(mixture.layers)
    yield Exchange("all-to-all", grid.expert, 1, forwards, forwards * mixture.experts * COUNT_BYTES)
