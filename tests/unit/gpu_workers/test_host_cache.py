"""What is unloaded goes on filling the engine's cache, and what is served is never what it gives up."""

from gpu_workers.engine.load import sum_samples
from gpu_workers.serving.adapters.host_cache import HostCache


def used(cache: HostCache, *names: str) -> None:
    for moment, name in enumerate(names):
        cache.touch(name, used_at=float(moment))


def test_with_room_nothing_is_asked() -> None:
    cache = HostCache(3)
    used(cache, "a", "b")

    assert cache.find_victims({"a", "b"}) == []


def test_what_was_unloaded_counts_until_it_is_pushed_out() -> None:
    cache = HostCache(3)
    used(cache, "unloaded", "a", "b")
    assert len(cache) == 3
    assert cache.find_victims({"a", "b"}) == []  # the next load evicts what serves no request

    cache.touch("c", used_at=9.0)

    assert cache.find_victims({"a", "b", "c"}) == ["a", "b", "c"]


def test_served_ones_older_than_every_unloaded_one_are_to_be_asked_first() -> None:
    cache = HostCache(4)
    used(cache, "idle", "idle2", "unloaded", "busy")

    assert cache.find_victims({"idle", "idle2", "busy"}) == ["idle", "idle2"]

    used_now = 9.0
    for name in ("idle", "idle2"):
        cache.touch(name, used_at=used_now)
    assert cache.find_victims({"idle", "idle2", "busy"}) == []


def test_metrics_are_summed_without_their_labels() -> None:
    text = """# HELP vllm:num_requests_running x
vllm:num_requests_running{engine="0",model_name="b"} 2.0
vllm:num_requests_running{engine="1",model_name="b"} 1.0
vllm:generation_tokens_total{engine="0",model_name="b"} 1.5e+03
process_cpu 3
"""

    assert sum_samples(text) == {"num_requests_running": 3.0, "generation_tokens_total": 1500.0}
