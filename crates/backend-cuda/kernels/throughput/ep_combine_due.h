/*
 * ep_combine_due.h: which rows a warp of a combine brings together where there are several nodes (EpTokens of ep_combine_ring.h).
 *
 *   reducer    of the own tokens: a row from each rank of the node, and from each other node its sum, by its rank on this rail
 *   gatherer   of the tokens of another node's rank on this rail: a row from each rank of this node
 */
#ifndef EP_COMBINE_DUE_H
#define EP_COMBINE_DUE_H

/* Whether any rank of a rank's node has rows of source. */
EP_DEV bool ep_node_gives_back(const EpRank& r, const EpCombineRingArgs& a, ep_u32 source, ep_u32 rank) {
    const ep_u32* rows = (const ep_u32*)a.combine.matrix + (ep_u64)source * r.w.ranks;
    const ep_u32 first = rank - rank % r.w.ranks_per_node;
    for (ep_u32 other = first; other < first + r.w.ranks_per_node; ++other)
        if (rows[other] > 0) return true;
    return false;
}

/* Whether a ring brings rows of source's tokens from rank; and by which of its positions a token has one from there: how many, from the first. */
EP_DEV bool ep_is_brought(const EpRank& r, const EpCombineRingArgs& a, ep_u32 source, ep_u32 rank) {
    if (!ep_is_beyond(r, rank)) return ep_gives_back(r, a, source, rank);
    return source == r.me && ep_is_neighbour(r, rank) && ep_node_gives_back(r, a, r.me, rank);
}
EP_DEV ep_u32 ep_due_by(const EpRank& r, const EpTokens& t, ep_u32 rank, ep_u32* first) {
    *first = rank - t.first;
    if (!ep_is_beyond(r, rank)) return 1;
    *first = rank - rank % r.w.ranks_per_node;
    return t.source == r.me && ep_is_neighbour(r, rank) ? r.w.ranks_per_node : 0;
}

/* Where the rows of rank lie that are pulled. Copied: a reference to either would keep the tokens in local memory. */
EP_DEV EpSource ep_rows_of(const EpSource* sources, const EpTokens& t, ep_u32 rank, bool own) {
    EpSource source = t.own;
    if (!own) source = sources[rank];
    return source;
}
#endif
