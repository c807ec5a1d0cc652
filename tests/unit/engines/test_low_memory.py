"""How much of a GPU is left when an engine has woken beside a rank."""

from rlinf_vl.engines.base import WAKE_RESERVE_BYTES, low_memory


def test_an_engine_that_woke_with_little_room_says_what_to_change():
    assert low_memory(WAKE_RESERVE_BYTES) is None
    said = low_memory(2**29)
    assert (
        said is not None
        and said.startswith("0.5 GiB of the GPU are free")
        and "actor.enable_offload=true" in said
    )
