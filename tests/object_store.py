"""What Ray's object store holds, for tests that look for what is left in it."""

import ray


def used_bytes() -> int:
    """What the object store of this node holds."""
    from ray._private.internal_api import get_memory_info_reply, get_state_from_address

    state = get_state_from_address(ray.get_runtime_context().gcs_address)
    return get_memory_info_reply(state).store_stats.object_store_bytes_used
