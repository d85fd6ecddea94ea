"""Sizes, multiprocessors and queue pairs that V2's callers ask for. They are hints: what a buffer takes follows its batches."""

from __future__ import annotations

import math

from moexpress import errors
from moexpress.adapter import limits

SIZE_ALIGN = 1 << 21
"""Sizes of buffers are multiples of this."""
MOST_TOPK = 32
"""Choices of a token where the caller does not say how many."""
HEADER = 16
"""Bytes of a row beside its elements, scales and choices."""
LINK_GBS = 405
"""GB/s of a GPU's links where nothing tells: nine tenths of 18 links of 25 GB/s."""
LEAST_SMS, LEAST_ALONE = 4, 64
"""Least multiprocessors of a call; and of one beside which nothing computes."""
MOST_SMS = 1 << 16
"""More than any device has."""
SPARE = 1.25
"""A share more multiprocessors than the model says."""
HYBRID_QPS, DIRECT_QPS = 129, 17
"""Queue pairs of a buffer that may, or may not, use its network in two steps. There are none here."""


def buffer_bytes(
    ranks: int, tokens: int, hidden: int, topk: int, use_fp8_dispatch: bool, allow_multiple_reduction: bool
) -> int:
    """Bytes of the rows of a worst batch: all tokens of all ranks to one, or their results back, whichever is more."""
    for name, value in {"num_max_tokens_per_rank": tokens, "hidden": hidden}.items():
        if value < 1:
            raise errors.InvalidArgument(f"{name} is {value}, allowed: 1 or more where num_bytes is not given")
    topk = topk or MOST_TOPK
    row = hidden + 4 * -(-hidden // 32) if use_fp8_dispatch else 2 * hidden
    there = ranks * tokens * (row + HEADER + 8 * topk)
    results = min(ranks, topk) if allow_multiple_reduction else topk
    back = results * tokens * (2 * hidden + HEADER + 4 * topk)
    return -(-max(there, back) // SIZE_ALIGN) * SIZE_ALIGN


def multiprocessors(
    ranks: int,
    experts: int,
    topk: int,
    link_gbs: float,
    read_gbs: float,
    write_gbs: float,
    prefers_overlap: bool,
    device: int | None,
) -> int:
    """Multiprocessors that keep the links busy when choices are balanced, an even number: each token is read once and written to
    the ranks that it is expected to go to, of which all but one are behind links. ``device``: those that it has, if it is a GPU."""
    if experts < 1 or experts % ranks:
        raise errors.InvalidArgument(f"num_experts is {experts}, allowed: a multiple of the {ranks} ranks")
    if not 1 <= topk <= experts:
        raise errors.InvalidArgument(f"num_topk is {topk}, allowed: 1 to {experts}, the experts")
    read_gbs, write_gbs = limits.real("sm_read_gbs", read_gbs), limits.real("sm_write_gbs", write_gbs)
    to = ranks * (1 - math.comb(experts - experts // ranks, topk) / math.comb(experts, topk))
    over_links = to * (1 - 1 / ranks)
    busy = link_gbs / over_links * max(1 / read_gbs, to / write_gbs) if over_links else 0
    least = LEAST_SMS if prefers_overlap else LEAST_ALONE
    # Rates may be anything, so what comes of them may be no number.
    wanted = 2 * math.ceil(max(least, busy * SPARE) / 2) if busy < MOST_SMS else MOST_SMS
    return wanted if device is None else min(wanted, device)


def queue_pairs(num_sms: int, allocated: int, hybrid: bool) -> int:
    """Queue pairs for a call of so many multiprocessors, at most those that were allocated."""
    return min(16 * num_sms + 1 if hybrid else min(num_sms, 9), allocated)
