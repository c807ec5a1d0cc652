"""Kinds of GPUs: what their makers say that they compute and move in a second.

Sources: NVIDIA's data sheets of the A100, H100, H200, B200, L20, L40S and of the Ada architecture
(GeForce RTX 4090). Products are dense ones in bfloat16 with float32 sums, without sparsity. NVLink
is one direction, so half of what is printed. Networks are those of the maker's own machines of 8
(DGX): one adapter of 400 Gbit/s for each GPU, 200 with A100; for cards without NVLink, 100 Gbit/s
for each machine of 8. What a program reaches of these is in `rlinf_vl.tools.memory.hours`.
"""

from dataclasses import dataclass

TERA, GIGA = 1e12, 1e9


@dataclass(frozen=True, slots=True)
class GpuKind:
    """A kind of GPU, in bytes and FLOPs a second.

    Attributes:
        gigabytes: memory as printed on the card.
        products: FLOPs of matrix products in bfloat16.
        memory: bytes from and to its memory.
        node: bytes to other GPUs of its machine, in one direction; `network`: to other machines.
        host: bytes to host memory, in one direction.
    """

    name: str
    gigabytes: int
    products: float
    memory: float
    node: float
    network: float
    host: float


GPU_KINDS = {
    kind.name: kind
    for kind in (
        GpuKind("rtx4090", 24, 165 * TERA, 1008 * GIGA, 26 * GIGA, 1.6 * GIGA, 26 * GIGA),
        GpuKind("a100-40", 40, 312 * TERA, 1555 * GIGA, 300 * GIGA, 25 * GIGA, 26 * GIGA),
        GpuKind("l20", 48, 119 * TERA, 864 * GIGA, 26 * GIGA, 1.6 * GIGA, 26 * GIGA),
        GpuKind("l40s", 48, 362 * TERA, 864 * GIGA, 26 * GIGA, 1.6 * GIGA, 26 * GIGA),
        GpuKind("a100", 80, 312 * TERA, 2039 * GIGA, 300 * GIGA, 25 * GIGA, 26 * GIGA),
        GpuKind("h100", 80, 989 * TERA, 3350 * GIGA, 450 * GIGA, 50 * GIGA, 52 * GIGA),
        GpuKind("h200", 141, 989 * TERA, 4800 * GIGA, 450 * GIGA, 50 * GIGA, 52 * GIGA),
        GpuKind("b200", 180, 2250 * TERA, 8000 * GIGA, 900 * GIGA, 50 * GIGA, 52 * GIGA),
    )
}
#: The kind that is assumed for cards of a size, where no kind is named.
USUAL = {24: "rtx4090", 40: "a100-40", 48: "l40s", 80: "h100", 141: "h200", 180: "b200"}


def kind_of_size(gigabytes: float) -> GpuKind:
    """Return the usual kind of card of the size nearest to this one."""
    size = min(USUAL, key=lambda card_size: abs(card_size - gigabytes))
    return GPU_KINDS[USUAL[size]]
