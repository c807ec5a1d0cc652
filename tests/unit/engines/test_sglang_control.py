"""What an SGLang engine tells its schedulers, and when it goes on, with stand-ins for SGLang's processes."""

import asyncio
import threading
from concurrent.futures import Future
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from rlinf_vl.engines.sglang import bans, engine, messages, ports
from rlinf_vl.engines.sglang.engine import SglangEngine
from rlinf_vl.engines.sglang.settings import ATTENTION_BACKENDS, Settings
from rlinf_vl.types import SamplingParams


class Host:
    """A host whose groups of attention answer a flush by `idle`, one entry a call, and note what is called."""

    def __init__(self, *idle):
        self.called, self.idle = [], list(idle)
        self.manager = SimpleNamespace(flush_cache=self.first_group)

    def run(self, operation, *arguments):
        done = Future()
        done.set_result(asyncio.run(operation(*arguments)))
        return done

    def call(self, operation, **fields):
        self.called.append(operation)

    async def first_group(self):
        return SimpleNamespace(success=self.idle.pop(0)[0])

    async def flush(self):
        return all(self.idle.pop(0))


def engine_of(host, **settings):
    made = object.__new__(SglangEngine)
    made.settings = Settings(model_path="", context_length=8, max_running=2, **settings)
    made.host, made.released_tags, made._unanswered = host, set(), set()
    made._control, made._is_empty = threading.RLock(), False
    return made


def test_memory_is_released_when_all_groups_of_attention_are_idle():
    host = Host((True, False), (True, True))
    engine_of(host, attn_dp_size=2, tp_size=2).release_memory()
    assert host.idle == [] and host.called == ["release_memory_occupation"]


def test_release_waits_until_all_gpus_of_the_engine_are_free(monkeypatch):
    """SGLang answers for the first GPU: here the second one follows two readings later."""
    gib = 2**30
    readings = iter([(40, 41), (10, 41), (10, 30), (10, 11)])
    reading = []

    def used(gpu):
        if gpu == 0:
            reading[:] = next(readings)
        return reading[gpu] * gib

    monkeypatch.setattr(torch.cuda, "device_memory_used", used)
    engine_of(Host((True,)), device="cuda", tp_size=2).release_memory()
    assert reading == [10, 11]


def test_a_gpu_that_stays_full_is_named_and_does_not_end_the_run(monkeypatch, caplog):
    monkeypatch.setattr(engine, "RELEASE_TIMEOUT_S", 0.05)
    readings = iter([40 * 2**30, 41 * 2**30, *[10 * 2**30, 41 * 2**30] * 100])
    monkeypatch.setattr(torch.cuda, "device_memory_used", lambda gpu: next(readings))
    engine_of(Host((True,)), device="cuda", tp_size=2).release_memory()
    assert "30.0, 0.0 GiB" in caplog.text


def test_an_engine_without_weights_wants_all_of_them():
    made = engine_of(Host((True,), (True,)))
    made.weight_names = frozenset({"a", "b", "c"})
    made.tower_weights, made._update_incomplete = frozenset(), False

    async def nothing():
        pass

    made.requests = SimpleNamespace(
        paused=False, towers=0, updates=0, unanswered_messages=0, session_updates={},
        park=nothing, resume=nothing,
    )  # fmt: skip
    made._hold = lambda: None
    made._is_empty = True
    with pytest.raises(ValueError, match="brought 1 of 3 not, such as 'b'"):
        made._update("update_weights_from_tensor", [(["a"], {}), (["c"], {})], version=1)
    assert made._is_empty and made._update_incomplete
    made._update("update_weights_from_tensor", [(["a", "b"], {}), (["c"], {})], version=1)
    assert made.version == 1 and not made._is_empty
    made._update("update_weights_from_tensor", [(["a"], {})], version=2)  # only what changed


def test_engines_of_a_host_have_ports_of_their_own():
    first, second = ports.PortBlock(), ports.PortBlock()
    try:
        used = [
            {block.arguments["nccl_port"], *range(derived, derived + 8)}
            for block in (first, second)
            for derived in [block.arguments["port"] + ports.DERIVED]
        ]
        assert not used[0] & used[1] and min(*used[0], *used[1]) > ports.RANGE.start
    finally:
        first.close()
        second.close()
    again = ports.PortBlock()
    again.close()
    assert again.arguments == first.arguments


def test_deterministic_mode_has_one_backend_of_attention():
    arguments = {"model_path": "", "context_length": 8, "max_running": 2, "deterministic": True}
    for change, backend in (
        ({}, "fa3"),
        ({"extra_arguments": {"attention_backend": "triton"}}, "triton"),
    ):
        made = Settings(**arguments, **change, device="cuda").server_arguments(0)
        assert {made.get(name) for name in ATTENTION_BACKENDS} == {backend}


def test_banned_ids_are_one_index_for_all_requests(monkeypatch):
    """No request carries a bias: SGLang would make a row of float32 over the vocabulary of each."""
    assert "logit_bias" not in messages.parameters(SamplingParams())
    banned = np.zeros(12, bool)
    banned[[0, 3, 4, 11]] = True
    monkeypatch.setenv(bans.VARIABLE, bans.as_text(banned))

    class SamplingBatch:
        def apply_logits_bias(self, logits):
            logits.add_(1)

    bans.ban_in_sampling(SamplingBatch)
    logits = torch.zeros(3, 12)
    SamplingBatch().apply_logits_bias(logits)
    p = logits.softmax(-1)
    assert (p[:, banned] == 0).all() and torch.equal(logits[:, ~banned], torch.ones(3, 8))
    assert bans.from_text(bans.as_text(np.zeros(3, bool))) == []
