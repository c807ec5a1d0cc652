"""Host memory that checkpoints are staged in: page-aligned blocks, page-locked once and reused.

torch's stager page-locks the memory of each tensor by itself. Small ones lie in one page, which
CUDA refuses to lock twice. Here tensors are cut from blocks that begin and end with a page, and
each block is locked when it is made.
"""

import logging
import mmap

import torch
from torch.distributed.checkpoint._state_dict_stager import StateDictStager

log = logging.getLogger(__name__)

#: Bytes of a block, unless one tensor takes more.
BLOCK_BYTES = 2**28
#: Bytes at whose multiples a tensor begins.
ALIGNMENT = 64
#: cudaHostRegisterPortable.
PORTABLE = 1


class StagingArena:
    """Blocks of memory that are handed out from their beginning after each `reset`.

    They are handed out in the order in which they were made.
    """

    def __init__(self, page_locked: bool) -> None:
        self.page_locked = page_locked
        self.blocks: list[torch.Tensor] = []  # uint8, each a multiple of the page size
        self._block = 0
        self._offset = 0

    def reset(self) -> None:
        """Hand out all memory again; contents handed out before will be overwritten."""
        self._block = self._offset = 0

    def take(self, nbytes: int) -> torch.UntypedStorage:
        """Return memory of this many bytes."""
        while self._block < len(self.blocks) and self._offset + nbytes > len(
            self.blocks[self._block]
        ):
            self._block, self._offset = self._block + 1, 0
        if self._block == len(self.blocks):
            self.blocks.append(self._new_block(max(nbytes, BLOCK_BYTES)))
        block, start = self.blocks[self._block], self._offset
        self._offset += -(-nbytes // ALIGNMENT) * ALIGNMENT
        if not nbytes:
            return torch.UntypedStorage(0)
        # A storage of its own: of a view, torch would write the whole block into the checkpoint.
        return torch.frombuffer(
            block.numpy().data, dtype=torch.uint8, offset=start, count=nbytes
        ).untyped_storage()

    def _new_block(self, nbytes: int) -> torch.Tensor:
        nbytes = -(-nbytes // mmap.PAGESIZE) * mmap.PAGESIZE
        block = torch.frombuffer(mmap.mmap(-1, nbytes), dtype=torch.uint8)
        if self.page_locked:
            # The block lives as long as the process, so it is never unlocked.
            runtime = torch.cuda.cudart()
            assert runtime is not None, "only memory beside a GPU is page-locked"
            status = int(runtime.cudaHostRegister(block.data_ptr(), nbytes, PORTABLE))
            if status:
                log.warning(
                    "%.1f GiB for checkpoints can't be page-locked (CUDA error %d): copying "
                    "takes longer; see ulimit -l",
                    nbytes / 2**30,
                    status,
                )
        return block


class ArenaStager(StateDictStager):
    """torch's stager of state dicts, with the copies in an arena's memory."""

    def __init__(self, page_locked: bool) -> None:
        super().__init__()
        self.arena = StagingArena(page_locked)

    def stage(self, state_dict: dict, non_blocking: bool = False) -> dict:
        """Copy the state, over the copy of the call before. Return when all of it is copied."""
        self.arena.reset()
        staged = super().stage(state_dict, non_blocking=non_blocking)
        if non_blocking:
            torch.cuda.synchronize()  # training may change the weights from here on
        return staged

    def _stage_untyped_storage(
        self, storage: torch.UntypedStorage, non_blocking: bool = False
    ) -> torch.UntypedStorage:
        host_storage = self.arena.take(storage.nbytes())
        host_storage.copy_(storage, non_blocking=non_blocking)
        return host_storage
