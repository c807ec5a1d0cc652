"""A cache bounded by bytes: what it keeps, what it drops, and that nothing is computed twice while it is kept."""

import threading
import tracemalloc

import pytest

from rlinf_vl.models.byte_cache import ByteCache, text_bytes
from rlinf_vl.rollout.episode.renderer import RENDERED_BYTES, Renderer
from rlinf_vl.rollout.episode.text_encoder import ENCODED_BYTES


def upper(calls):
    def compute(text):
        calls.append(text[:1])
        return text.upper()

    return compute


def test_the_least_recently_used_entries_go_when_the_bytes_are_used_up():
    calls = []
    cache = ByteCache(upper(calls), size=lambda text, value: len(text), max_bytes=250)
    a, b, c = "a" * 100, "b" * 100, "c" * 100
    assert cache(a) == "A" * 100 and cache(b) == "B" * 100 and cache(a) == "A" * 100
    cache(c)  # 300 bytes: b goes, a was used after it
    assert cache.n_bytes == 200 and calls == ["a", "b", "c"]
    cache(a)
    cache(b)
    assert calls == ["a", "b", "c", "b"]


def test_an_entry_above_the_bound_is_kept_alone():
    cache = ByteCache(upper([]), size=lambda text, value: len(text), max_bytes=10)
    cache("a")
    cache("b" * 50)
    assert cache.n_bytes == 50
    cache("c")
    assert cache.n_bytes == 1


def test_the_bytes_of_texts_and_ids_are_those_that_python_takes():
    tracemalloc.start()
    before = tracemalloc.get_traced_memory()[0]
    argument = "é" * 20_000
    value = tuple(range(10_000, 30_000))
    taken = tracemalloc.get_traced_memory()[0] - before
    tracemalloc.stop()
    assert abs(text_bytes(argument, value) / taken - 1) < 0.2


def test_threads_share_one_result():
    started, results = threading.Barrier(4), []
    cache = ByteCache(lambda text: [text], size=lambda text, value: 1, max_bytes=10)

    def ask():
        started.wait()
        results.append(cache("a"))

    threads = [threading.Thread(target=ask) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len({id(result) for result in [*results[1:], cache("a")]} | {id(results[0])}) == 1
    assert cache.n_bytes == 1


@pytest.mark.slow
def test_long_prompts_do_not_fill_the_renderers_memory(toy_folder):
    """Bounded by 512 entries, prompts of a megabyte took a gigabyte with their JSON."""
    from rlinf_vl.models.families import family_of
    from rlinf_vl.models.processing import Processor

    renderer = Renderer(Processor(toy_folder, family_of("qwen3_vl")))
    for number in range(100):
        renderer._render([{"role": "user", "content": f"{number} " + "x" * 1_000_000}])
    assert renderer._render_json.n_bytes <= RENDERED_BYTES
    for number in range(40):
        renderer._encoder.encode_plain(f"{number} " + "x " * 50_000)
    assert renderer._encoder.encode_plain.n_bytes <= ENCODED_BYTES
