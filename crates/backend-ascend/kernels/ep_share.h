/*
 * ep_share.h: how the cores of a launch that share a batch wait for each other: a word for each core, which holds the number of the last launch in
 * which the core has told what others need of its share. A core waits for cores before it alone, so the first waits for nobody.
 */
#ifndef EP_SHARE_H
#define EP_SHARE_H
#include "ep_rows.h"

/* This core has told, in the launch `ticket`. It has landed. */
EP_DEV void ep_share_tell(EpCore& c, ep_u64 ready, ep_u64 ticket) { ep_store_word(c, ready + (ep_u64)c.number * 8, ticket, 8); }

/* Waits until a core has told. False where it does not in time. */
EP_DEV bool ep_share_await(EpCore& c, ep_u64 ready, ep_u64 ticket, ep_u32 core) {
    while (ep_fresh<uint64_t>(ready + (ep_u64)core * 8) != ticket && !EP_PLANTED(c, SHARE_UNAWAITED))
        if (ep_waited(c) > c.launch.r.allowed) return false;
    return true;
}

#endif
