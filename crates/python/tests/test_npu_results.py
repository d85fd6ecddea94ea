"""NPUs: results of low latency that are asked for before they have come."""

from __future__ import annotations

import pytest
import torch
from moexpress import Communicator, Meeting, errors
from tests import npus
from tests.conftest import Ranks
from tests.npus import clean, needs_twin, put, started

EXPERTS, TOPK, HIDDEN = 4, 2, 64


def _asked_for_before(rank: int, world: int, library: str) -> None:
    npu = started(rank, world, world, library)
    meeting = Meeting()
    one = Communicator(meeting, experts=EXPERTS, topk=TOPK, hidden=HIDDEN, max_tokens=4, device="npu", low_latency=True)
    x = put(npu, torch.full((3, HIDDEN), 1.0 + rank).bfloat16())
    topk_idx = put(npu, torch.tensor([[0, 2], [1, 3], [2, 0]]))
    sent = one.send_dispatch(x, topk_idx)
    shown, counts = sent.result.x, sent.result.expert_counts
    before = shown.data
    # Where it lay before nobody else lies yet, so that the test itself harms nothing.
    shown.data = npu.empty((1,), torch.bfloat16)
    with pytest.raises(errors.InvalidArgument, match="results asked for before they came is of shape"):
        sent.receive()
    shown.data = before
    received = sent.receive()
    assert received.x is shown and received.expert_counts is counts
    assert counts.tolist() == [2 * world, world]
    rows = [float(shown[0, i, 0]) for i in range(2 * world)]
    assert sorted(rows) == sorted(2 * [1.0 + other for other in range(world)])
    meeting.barrier()
    one.close()
    meeting.close()
    clean(npu)


@needs_twin
def test_a_tensor_that_was_taken_away_since_is_refused_before_anything_is_received() -> None:
    Ranks(2).run(_asked_for_before, npus.library(), limit=60)
