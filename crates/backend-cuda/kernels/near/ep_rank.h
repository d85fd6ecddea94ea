/*
 * ep_rank.h: one rank's state in the memory of its device.
 */
#ifndef EP_RANK_H
#define EP_RANK_H
#include "ep_device.h"
#include "ep_args.h"

/* Whether the word at an address, which the host writes meanwhile, is not 0. */
EP_DEV bool ep_flag(ep_u64 at) { return ep_ld_acquire4((const void*)at) != 0; }

EP_DEV EpLocal* ep_local(const EpRank& r) { return (EpLocal*)r.local; }
EP_DEV ep_u64 ep_op(const EpRank& r) { return ep_local(r)->ops_done + 1; }
/* What all ranks must agree on. The number of a replayed dispatch is read here: a graph makes a new one each time it runs. */
EP_DEV ep_u64 ep_settings(const EpRank& r) { return r.settings + (r.replays ? ((const EpPlan*)r.plan)->op : 0); }
EP_DEV bool ep_is_gone(const EpRank& r, ep_u32 rank) { return ep_flag(ep_gone_at(r.local, rank)); }

#include "ep_test.h"

EP_DEV bool ep_failed(const EpRank& r) { return ep_ld_relaxed(&ep_local(r)->failed) != 0 || ep_crashed(r); }

#endif
