"""What dispatches over several nodes leave behind: DeepEP's tuple of ten."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Any

import torch
from moexpress import errors

from ._handles import DispatchHandle, Known, Parts, Routing


class InternodeHandle(DispatchHandle):
    """Over several nodes, each of ``local`` ranks:

    - is_token_in_rank bool ``[tokens, ranks]``;
    - rdma_channel_prefix_matrix int32 ``[nodes, channels]``, gbl_channel_prefix_matrix int32 ``[ranks, channels]``: tokens of channels 0 to
      ``column`` that go to node, or rank, ``row``;
    - recv_rdma_channel_prefix_matrix int32 ``[nodes, channels]``: rows of channels 0 to ``column`` that passed through this rank from node
      ``row``; recv_rdma_rank_prefix_sum int32 ``[nodes]``: those from that node and the ones before it;
    - recv_gbl_channel_prefix_matrix int32 ``[ranks, channels]``: where, among the received rows, those of rank ``row`` and channel ``column``
      begin; recv_gbl_rank_prefix_sum int32 ``[ranks]``: rows from that rank and the ones before it;
    - recv_src_meta uint8 ``[rows, 8]``: int32 node that the row came from, and int32 with the bit of this rank's place in its node;
    - send_rdma_head int32 ``[tokens, nodes]``: the token's number among those of its channel to the node, or -1;
    - send_nvl_head int32 ``[rows that passed, local]``: the row's number among those of its node and channel to the rank, or -1.

    What passed through a rank GPUs do not tell their host: there recv_rdma_channel_prefix_matrix, recv_rdma_rank_prefix_sum and send_nvl_head raise
    :class:`moexpress.errors.Unsupported`, and are empty where the tuple is taken apart.
    """

    source_rank: torch.Tensor
    source_token: torch.Tensor
    local: int

    @classmethod
    def of(
        cls,
        routing: Routing,
        known: Known[Routing],
        source: tuple[torch.Tensor, torch.Tensor],
        in_rank: torch.Tensor,
        ranks_per_node: int,
    ) -> InternodeHandle:
        """Of a dispatch, to be found again in ``known``. ``source``: rank and token of each received row."""
        handle = cls((in_rank, *[None] * (Parts.SEVERAL_NODES.entries - 1)))
        handle.routing, handle.known, handle.local = routing, known, ranks_per_node
        handle.source_rank, handle.source_token = source
        return handle

    def __iter__(self) -> Iterator[Any]:
        for index in range(len(self)):
            try:
                yield self[index]
            except errors.Unsupported:
                # Whoever saves a handle's tensors is to have the others.
                yield torch.empty(0, dtype=torch.int32, device=self.source_rank.device)

    def _handed_over(self, index: int, held: Any) -> Any:
        return (
            held
            if held is not None
            else (
                self._rdma_channel_prefix,
                self._channel_prefix,
                self._recv_rdma_channel_prefix,
                self._recv_rdma_rank_prefix_sum,
                self._recv_channel_prefix,
                self._recv_rank_prefix_sum,
                self._recv_src_meta,
                self._send_rdma_head,
                self._send_nvl_head,
            )[index - 1]()
        )

    @property
    def _nodes(self) -> int:
        return self.routing.arena.communicator.ranks // self.local

    def _rdma_channel_prefix(self) -> torch.Tensor:
        channels = self.routing.channels
        return self._filled(self._nodes, channels, partial(self.routing.native.node_prefix, channels))

    def _recv_rdma_channel_prefix(self) -> torch.Tensor:
        channels = self.routing.channels
        return self._filled(self._nodes, channels, partial(self.routing.native.rail_prefix, channels))

    def _recv_rdma_rank_prefix_sum(self) -> torch.Tensor:
        return self._recv_rdma_channel_prefix()[:, -1].cumsum(0).int()

    def _recv_rank_prefix_sum(self) -> torch.Tensor:
        return self._rank_prefix()[:, self.routing.arena.communicator.rank].contiguous()

    def _recv_channel_prefix(self) -> torch.Tensor:
        before = self._recv_rank_prefix_sum().roll(1)
        before[0] = 0
        return self._source_channel_prefix(self.source_token) + before.unsqueeze(1)

    def _recv_src_meta(self) -> torch.Tensor:
        meta = torch.empty((self.source_rank.shape[0], 2), dtype=torch.int32, device=self.source_rank.device)
        meta[:, 0] = self.source_rank // self.local
        meta[:, 1] = 1 << self.routing.arena.communicator.rank % self.local
        made = meta.view(torch.uint8)
        # From here on the tuple may be put together again by whoever asks.
        self.known.remember(made, self.routing)
        return made

    def _send_rdma_head(self) -> torch.Tensor:
        native, channels = self.routing.native, self.routing.channels
        return self._filled(native.tokens, self._nodes, partial(native.node_head, channels))

    def _send_nvl_head(self) -> torch.Tensor:
        native, channels = self.routing.native, self.routing.channels
        return self._filled(native.rail_rows(), self.local, partial(native.rail_head, channels))
