//! How much buffer DeepEP's V1 `Buffer` asks for, by its public size hints.
//!
//! Source of the formulas: `csrc/config.hpp` of <https://github.com/deepseek-ai/DeepEP> (V1: `Config`'s
//! `get_nvl_buffer_size_hint` and `get_rdma_buffer_size_hint`, and `get_low_latency_rdma_size_hint`), and the default
//! configurations of `deep_ep/buffer.py`. Sizes are bytes a rank.

/// Ranks of an NVLink domain that DeepEP V1 assumes.
const NVL_PEERS: u64 = 8;
/// Choices of a token that normal mode leaves room for.
const MAX_TOPK: u64 = 128;
/// Scales of a row that normal mode leaves room for.
const MAX_SCALES: u64 = 128;
/// Source rank, and a mask of its node's ranks.
const SOURCE_META_BYTES: u64 = 8;
/// A control word of the network: 16 bytes.
const CONTROL_BYTES: u64 = 16;
/// Channels of the default 20 SMs: two SMs a channel.
const DEFAULT_CHANNELS: u64 = 10;
const ALIGNMENT: u64 = 128;

/// Chunk sizes of normal mode, in rows.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
struct Chunks {
    nvl_recv: u64,
    rdma_send: u64,
    rdma_recv: u64,
}

/// What DeepEP V1 needs for a layer.
#[derive(Clone, Copy, PartialEq, Eq, Debug, serde::Serialize)]
pub(crate) struct Needs {
    /// Normal mode, over NVLink: none where it has no default configuration for the number of ranks.
    pub(crate) normal_nvl_bytes: Option<u64>,
    /// Normal mode, over RDMA: none as above.
    pub(crate) normal_rdma_bytes: Option<u64>,
    /// Low-latency mode.
    pub(crate) low_latency_rdma_bytes: u64,
}

/// The sizes for bf16 rows of `hidden` elements.
pub(crate) fn needs(ranks: u32, experts: u32, hidden: u32, max_tokens: u32) -> Needs {
    let (ranks, row) = (u64::from(ranks), 2 * u64::from(hidden));
    let largest = |hint: fn(Chunks, u64, u64) -> u64| {
        default_chunks(ranks).map(|both| both.into_iter().map(|chunks| hint(chunks, ranks, row)).fold(0, u64::max))
    };
    Needs {
        normal_nvl_bytes: largest(nvl_hint),
        normal_rdma_bytes: largest(rdma_hint),
        low_latency_rdma_bytes: low_latency_hint(u64::from(max_tokens), u64::from(hidden), u64::from(experts)),
    }
}

/// Default chunks of dispatch and combine, for the numbers of ranks that have them.
fn default_chunks(ranks: u64) -> Option<[Chunks; 2]> {
    let (nvl_recv, dispatch_send, combine_send) = match ranks {
        2 | 4 | 8 => (256, 6, 6),
        16 => (288, 20, 12),
        24 | 32 | 64 => (288, 8, 8),
        96 => (480, 12, 8),
        128 => (560, 12, 8),
        144 => (720, 12, 8),
        160 => (720, 12, 8),
        _ => return None,
    };
    Some([dispatch_send, combine_send].map(|rdma_send| Chunks { nvl_recv, rdma_send, rdma_recv: 128 }))
}

/// Everything that travels with a row in normal mode, without the row.
const ROW_EXTRAS: u64 = SOURCE_META_BYTES + MAX_TOPK * (8 + 4) + MAX_SCALES * 4;

fn nvl_hint(chunks: Chunks, ranks: u64, row: u64) -> u64 {
    let nodes = (ranks / NVL_PEERS).max(1);
    let rings = DEFAULT_CHANNELS * ranks.min(NVL_PEERS);
    let cursors = (2 * nodes + 3) * 4;
    (rings * (cursors + chunks.nvl_recv * (row + ROW_EXTRAS))).next_multiple_of(ALIGNMENT)
}

fn rdma_hint(chunks: Chunks, ranks: u64, row: u64) -> u64 {
    if ranks <= NVL_PEERS {
        return 0;
    }
    const SPARE: u64 = 1 << 20;
    let rings = DEFAULT_CHANNELS * (ranks / NVL_PEERS);
    let cursors = (2 * NVL_PEERS + 2) * 4;
    let rows = chunks.rdma_recv.next_multiple_of(chunks.rdma_send);
    (2 * rings * (cursors + rows * (row + ROW_EXTRAS + CONTROL_BYTES)) + SPARE).next_multiple_of(ALIGNMENT)
}

/// Two banks each of: a send buffer, a slot for every token at every expert, a counter for every expert. Slots hold a
/// bf16 row and the larger of both directions' headers. It does not depend on the number of ranks.
fn low_latency_hint(max_tokens: u64, hidden: u64, experts: u64) -> u64 {
    let scales = hidden / 128;
    let dispatch_slot = CONTROL_BYTES + (2 * hidden).max(hidden + 4 * scales);
    let combine_slot = 4 * scales + 2 * hidden;
    let send = max_tokens * dispatch_slot.max(experts * combine_slot);
    let receive = experts * max_tokens * dispatch_slot.max(combine_slot);
    let counters = (4 * experts).next_multiple_of(ALIGNMENT);
    let total = 2 * (send + receive + counters);
    // The source adds a whole alignment unit where the size is aligned already.
    (total / ALIGNMENT + 1) * ALIGNMENT
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn low_latency_takes_two_gigabytes_for_a_published_example() {
        // 128 tokens, hidden 7168, 288 experts: slots of 16 + 14336 and 224 + 14336 bytes.
        let slots = 128 * 288 * 14560;
        assert_eq!(low_latency_hint(128, 7168, 288), 4 * slots + 2 * 1152 + 128);
    }

    #[test]
    fn normal_mode_of_one_node_needs_no_network() {
        let needs = needs(8, 256, 7168, 128);
        assert_eq!(needs.normal_rdma_bytes, Some(0));
        // 80 rings of 5 cursors and 256 rows of 14336 + 8 + 128 * 12 + 128 * 4 bytes.
        assert_eq!(needs.normal_nvl_bytes, Some(u64::next_multiple_of(80 * (20 + 256 * 16392), 128)));
    }

    #[test]
    fn network_rings_hold_whole_chunks() {
        let chunks = Chunks { nvl_recv: 288, rdma_send: 20, rdma_recv: 128 };
        let bytes = 2 * 20 * (72 + 140 * (14336 + 2056 + 16)) + (1 << 20);
        assert_eq!(rdma_hint(chunks, 16, 14336), u64::next_multiple_of(bytes, 128));
    }

    #[test]
    fn numbers_of_ranks_without_a_default_have_no_normal_mode() {
        assert_eq!(needs(3, 6, 128, 1).normal_nvl_bytes, None);
    }
}
