"""`deep_ep.utils` and `deep_ep.Config`, without any ranks."""

from __future__ import annotations

import deep_ep
import pytest
import torch
from deep_ep.utils import EventHandle, EventOverlap
from deep_ep.utils.gate import get_unbalanced_scores
from deep_ep.utils.math import (
    align,
    calc_diff,
    ceil_div,
    count_bytes,
    create_grouped_scores,
    hash_tensor,
    hash_tensors,
    inplace_unique,
    per_token_cast_back,
    per_token_cast_to_fp8,
    safe_div,
)
from deep_ep.utils.semantic import value_or
from deep_ep.utils.testing import bench, bench_kineto


def test_casts_to_fp8_and_back_lose_little() -> None:
    x = torch.randn(7, 384, generator=torch.Generator().manual_seed(0)).bfloat16()
    x[3] = 0
    codes, scales = per_token_cast_to_fp8(x)
    assert (codes.dtype, scales.dtype, scales.shape) == (torch.float8_e4m3fn, torch.float32, (7, 3))
    assert torch.equal(scales[3], torch.full((3,), 1e-4 / 448))
    assert calc_diff(per_token_cast_back(codes, scales).float(), x.float()) < 1e-3
    assert per_token_cast_back(codes[:0], scales[:0]).shape == (0, 384)
    short, rest = per_token_cast_to_fp8(x[:, :300])
    assert (
        torch.equal(short.float()[:, :256], codes.float()[:, :256]) and short.shape == (7, 300) and rest.shape == (7, 3)
    )
    assert calc_diff(per_token_cast_back(short, rest).float(), x[:, :300].float()) < 1e-3
    with pytest.raises(ValueError, match="x has 1 dimensions, allowed: 2"):
        per_token_cast_to_fp8(torch.zeros(100))


def test_sizes_round_up_and_count() -> None:
    assert [align(rows, 16) for rows in (0, 1, 16, 17)] == [0, 16, 16, 32]
    assert (ceil_div(7, 2), safe_div(0, 0), safe_div(1, 4), value_or(None, 3), value_or(0, 3)) == (4, 0, 0.25, 3, 0)
    with pytest.raises(ZeroDivisionError):
        safe_div(1, 0)
    nested = (torch.zeros(3, dtype=torch.int32), [None, torch.zeros(2, 2, dtype=torch.uint8)])
    assert count_bytes(*nested) == 16
    assert hash_tensors(*nested) == 0 != hash_tensors(nested[0] + 1, None)
    scores = create_grouped_scores(torch.ones(2, 6), torch.tensor([[0], [2]]), 3)
    assert scores.tolist() == [[1, 1, 0, 0, 0, 0], [0, 0, 0, 0, 1, 1]]


@pytest.mark.parametrize("precise", [False, True])
@pytest.mark.parametrize("ratio", [1.0, 2.5])
def test_scores_give_one_rank_more(precise: bool, ratio: float) -> None:
    torch.manual_seed(0)
    scores = get_unbalanced_scores(3000, 32, 4, 6, ratio, precise)
    assert scores.shape == (3000, 32) and scores.dtype == torch.float32
    rank = scores.topk(6, dim=1).indices // 8
    tokens = torch.stack([(rank == one).any(1).sum() for one in range(4)]).float()
    assert float(tokens[0] / tokens[1:].mean()) == pytest.approx(ratio, rel=0.01 if precise else 0.06)
    with pytest.raises(ValueError, match=r"ratio is 0.5, allowed: 1 or more"):
        get_unbalanced_scores(3, 32, 4, 6, 0.5, precise)


def test_packed_exponents_are_scales() -> None:
    codes = torch.ones(1, 512).to(torch.float8_e4m3fn)
    packed = torch.tensor([[127, 128, 126, 130]], dtype=torch.uint8).view(torch.int32)
    back = per_token_cast_back(codes, packed)
    assert back[0, ::128].tolist() == [1, 2, 0.5, 8]
    # As DeepEP's tests hand them over: rows of packs, seen as if they were not packed.
    rows = per_token_cast_back(codes.expand(4, 512), packed.expand(4, 1).reshape(-1, 4))
    assert torch.equal(rows, back.expand(4, 512))


def test_equal_tensors_do_not_differ() -> None:
    x = torch.randn(100, generator=torch.Generator().manual_seed(0))
    assert calc_diff(x, x) == pytest.approx(0, abs=1e-12) and calc_diff(x, -x) > 0.1


def test_unique_numbers_descend_and_the_rest_is_minus_one() -> None:
    x = torch.tensor([[3, 1, 3, -1], [-1, -1, -1, -1], [0, 2, 1, 0], [-7, 4, 4, 4]])
    inplace_unique(x, 5)
    assert x.tolist() == [[3, 1, -1, -1], [-1, -1, -1, -1], [2, 1, 0, -1], [4, -1, -1, -1]]
    with pytest.raises(ValueError, match="largest number of x is 4, allowed: less than 4"):
        inplace_unique(x, 4)


def test_hashes_see_a_bit() -> None:
    x = torch.arange(13, dtype=torch.bfloat16)
    before = hash_tensor(x)
    assert before == hash_tensor(x.clone())
    x[12] = 12.0625
    assert before != hash_tensor(x)


def test_bench_leaves_the_first_run_out() -> None:
    runs = []
    mean, least, largest = bench(lambda: runs.append(1), num_warmups=2, num_tests=5)
    assert len(runs) == 7 and 0 <= least <= mean <= largest
    if not torch.cuda.is_available():
        with pytest.raises(NotImplementedError, match="use bench"):
            bench_kineto(lambda: None, "kernel")


def test_events_of_cpus_are_past() -> None:
    EventHandle().current_stream_wait()
    with EventOverlap(EventHandle()) as event:
        event.current_stream_wait()
    with EventOverlap():
        pass
    called: list[int] = []
    event = EventOverlap(EventHandle())
    event.register_hook_after_wait(lambda: called.append(1))
    with pytest.raises(AssertionError, match="there is a hook already"):
        event.register_hook_after_wait(lambda: None)
    with event(release_handle=True):
        assert not called
    assert called == [1] and event.event is None
    event = EventOverlap(EventHandle())
    event.register_hook_after_wait(lambda: "sorted")
    assert event.wait() == "sorted" and event.wait() is None
    event.register_hook_after_wait(lambda: "again")
    assert event.current_stream_wait(release_handle=True) == "again" and event.event is None
    with pytest.raises(AssertionError, match="not asynchronous"):
        EventOverlap().current_stream_wait()
    assert deep_ep.Buffer.capture().event is not None


@pytest.mark.parametrize(
    ("ranks", "dispatch", "combine"),
    [
        (2, (24, 256, 6, 128), (10, 256, 6, 128)),
        (4, (6, 256, 6, 128), (9, 256, 6, 128)),
        (8, (6, 256, 6, 128), (4, 256, 6, 128)),
        (16, (36, 288, 20, 128), (4, 288, 12, 128)),
        (24, (32, 288, 8, 128), (1, 288, 8, 128)),
        (64, (32, 288, 8, 128), (1, 288, 8, 128)),
        (96, (20, 480, 12, 128), (1, 480, 8, 128)),
        (128, (20, 560, 12, 128), (1, 560, 8, 128)),
        (144, (32, 720, 12, 128), (2, 720, 8, 128)),
        (160, (28, 720, 12, 128), (2, 720, 8, 128)),
    ],
)
def test_recommended_chunks(ranks: int, dispatch: tuple[int, ...], combine: tuple[int, ...]) -> None:
    for config, expected in [
        (deep_ep.Buffer.get_dispatch_config(ranks), dispatch),
        (deep_ep.Buffer.get_combine_config(ranks), combine),
    ]:
        assert config.num_sms == deep_ep.Buffer.num_sms
        told = (
            config.num_max_nvl_chunked_send_tokens,
            config.num_max_nvl_chunked_recv_tokens,
            config.num_max_rdma_chunked_send_tokens,
            config.num_max_rdma_chunked_recv_tokens,
        )
        assert told == expected
        # However large outboxes are, what DeepEP recommends uses all of them, in steps that are no smaller than the usual.
        for slots in (8, 64, 96, 256):
            piece, held = config.outbox(slots)
            assert held == slots and 8 <= piece <= max(8, slots // 8)


@pytest.mark.parametrize(
    ("config", "ranks", "nvl", "rdma"),
    [
        ((20, 24, 256, 6, 128), 2, 83_927_552, 0),
        ((20, 6, 256, 6, 128), 8, 335_709_824, 0),
        ((20, 36, 288, 20, 128), 16, 377_673_984, 91_887_744),
        ((24, 20, 480, 12, 128), 96, 755_353_728, 623_787_264),
    ],
)
def test_size_hints_are_deep_eps(config: tuple[int, ...], ranks: int, nvl: int, rdma: int) -> None:
    hints = deep_ep.Config(*config)
    told = hints.get_nvl_buffer_size_hint(2 * 7168, ranks), hints.get_rdma_buffer_size_hint(2 * 7168, ranks)
    assert told == (nvl, rdma)


def test_configs_and_size_hints() -> None:
    config = deep_ep.Config()
    assert repr(config) == "Config(20, 6, 256, 6, 256)"
    small, large = (config.get_nvl_buffer_size_hint(size, 8) for size in (7168, 14336))
    assert 0 < small < large
    assert config.get_rdma_buffer_size_hint(7168, 8) == 0 < config.get_rdma_buffer_size_hint(7168, 16)
    hints = [deep_ep.Buffer.get_low_latency_rdma_size_hint(tokens, 7168, 8, 288) for tokens in (64, 128)]
    assert 0 < hints[0] < hints[1]
    with pytest.raises(ValueError, match="num_sms is 3, allowed: an even number"):
        deep_ep.Config(3)
    for sizes, told in [
        ((4, 0), "num_max_nvl_chunked_send_tokens is 0, allowed: 1 to"),
        ((4, 6, 6), "num_max_nvl_chunked_recv_tokens is 6, allowed: more than the 6 that are sent at a time"),
        ((4, 6, 0), "num_max_nvl_chunked_recv_tokens is 0, allowed: more than the 6"),
        ((4, 6, -1), "num_max_nvl_chunked_recv_tokens is -1, allowed: 0 to"),
        ((4, 6, 256, 0, 8), "num_max_rdma_chunked_send_tokens is 0, allowed: 1 to"),
        ((4, 6, 256, 8, 8), "num_max_rdma_chunked_recv_tokens is 8, allowed: more than the 8"),
    ]:
        with pytest.raises(ValueError, match=told):
            deep_ep.Config(*sizes)
    with pytest.raises(ValueError, match="num_sms is 7, allowed: an even number"):
        deep_ep.Buffer.set_num_sms(7)
    with pytest.raises(ValueError, match="experts is 7, allowed: a multiple of the 8 ranks"):
        deep_ep.Buffer.get_low_latency_rdma_size_hint(128, 7168, 8, 7)


@pytest.mark.parametrize(
    ("send", "recv", "slots", "expected"),
    [
        (6, 256, 0, None),
        (1, 256, 96, (8, 96)),
        (8, 64, 96, (8, 64)),
        (24, 256, 96, (12, 96)),
        (10, 256, 96, (10, 96)),
        (24, 256, 256, (24, 256)),
        (36, 288, 512, (36, 288)),
        (1, 2, 96, (8, 2)),
    ],
)
def test_a_config_says_what_a_call_uses_of_outboxes(
    send: int, recv: int, slots: int, expected: tuple[int, int] | None
) -> None:
    assert deep_ep.Config(20, send, recv).outbox(slots) == expected


def test_the_package_has_deep_eps_names() -> None:
    for name in ("Buffer", "Config", "EventOverlap", "EventHandle", "topk_idx_t"):
        assert hasattr(deep_ep, name)
    assert deep_ep.topk_idx_t == torch.int64
