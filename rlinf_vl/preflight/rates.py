"""The rates of a machine: those assumed of a kind of GPU, or those that `calibrate` measured.

The shares of a maker's figures are assumptions, and the largest errors of an estimate come from
them. They are what well-tuned programs are reported to reach: 60 % of the products in training,
half of that in the grouped products of experts, 35 % in attention, 70 to 80 % of the memory.
"""

from dataclasses import asdict, dataclass

from rlinf_vl.preflight.gpu_kinds import GpuKind

PRODUCTS_SHARE = 0.6
GROUPED_SHARE = 0.3
ATTENTION_SHARE = 0.35
MEMORY_SHARE = 0.75
LINK_SHARE = 0.7
#: Processes at once with which `calibrate` measures a slowdown, at most: each takes memory.
MOST_AT_ONCE = 8


@dataclass(frozen=True)
class Rates:
    """Seconds and rates of one slot: a GPU, or an actor process on a CPU.

    Attributes:
        source: where they are from.
        products: FLOPs a second of matrix products in training; `grouped`: of experts' products;
            `attention`: of attention; `tower`: of a frozen vision tower's products.
        memory: bytes a second that other operations read and write.
        operation_s: seconds in which Python and PyTorch dispatch an operation.
        overlaps_host: whether the device computes while the host dispatches.
        decode_products, decode_memory: products and memory of decoding.
        decode_step_s: seconds of a step of decoding beside its work; `decode_layer_s`: of each of
            its layers; `decode_row_s`: of each response in it.
        prefill_products: FLOPs a second of prompts in the engine.
        node, network, host, disk: bytes a second to a slot of the same machine, to another machine,
            to host memory, and to a machine's disk.
        collective_s: seconds of a collective beside its bytes.
        optimizer_memory: bytes a second of an optimizer step.
        sync_s: seconds of a weight sync beside its bytes; `wake_s`: of sleeping and waking.
        changes: bytes a second of changed weights from one process to another (`delta`): found,
            encoded, copied and written; 0: not measured.
        group_s: seconds of a group beside its tokens: its row, prompt, images, reward and transport.
        step_s: seconds of a step beside all of these: planning, logging.
        record_s: seconds of a processor in which a process of its own records a step's trajectories.
        cores: of the machine, where slots are processes that share them; 0: each has its device.
        full_slowdown: seconds of a slot while all cores compute, `MOST_AT_ONCE` at most, over its
            seconds alone.
    """

    source: str
    products: float
    grouped: float
    attention: float
    tower: float
    memory: float
    operation_s: float
    overlaps_host: bool
    decode_products: float
    decode_memory: float
    decode_step_s: float
    decode_layer_s: float
    decode_row_s: float
    prefill_products: float
    node: float
    network: float
    host: float
    disk: float
    collective_s: float
    optimizer_memory: float
    sync_s: float
    wake_s: float
    group_s: float
    step_s: float
    record_s: float = 0.0
    cores: int = 0
    full_slowdown: float = 1.0
    changes: float = 0.0

    def slowdown(self, busy: int) -> float:
        """Return the seconds of a slot while so many of a machine compute, over its seconds alone.

        Processes on cores share caches and memory, and take turns where they are more than those.
        """
        if not self.cores or busy <= 1:
            return 1.0
        share = min(1.0, (busy - 1) / max(1, min(self.cores, MOST_AT_ONCE) - 1))
        return (1 + (self.full_slowdown - 1) * share) * max(1.0, busy / self.cores)

    def as_dict(self) -> dict[str, float | str | bool]:
        """Return the rates by name, for a file."""
        return asdict(self)


def rates_of(kind: GpuKind) -> Rates:
    """Return the assumed rates of a kind of GPU."""
    return Rates(
        source=f"assumed shares of {kind.name}'s data sheet",
        products=PRODUCTS_SHARE * kind.products,
        grouped=GROUPED_SHARE * kind.products,
        attention=ATTENTION_SHARE * kind.products,
        tower=PRODUCTS_SHARE * kind.products,
        memory=MEMORY_SHARE * kind.memory,
        operation_s=8e-6,
        overlaps_host=True,
        decode_products=0.4 * kind.products,
        decode_memory=0.7 * kind.memory,
        # A captured graph of about ten small kernels a layer, and the sampler.
        decode_step_s=1.5e-3,
        decode_layer_s=4e-5,
        decode_row_s=4e-6,
        prefill_products=0.45 * kind.products,
        node=LINK_SHARE * kind.node,
        network=LINK_SHARE * kind.network,
        host=0.8 * kind.host,
        disk=2e9,
        collective_s=3e-5,
        optimizer_memory=0.6 * kind.memory,
        sync_s=1.0,
        wake_s=1.0,
        group_s=5e-3,
        step_s=1.0,
    )
