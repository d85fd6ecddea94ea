/*
 * ep_verbs.h: the verbs by which kernels reach other ranks: their names, who calls them, and what they order.
 *
 * A device has the words of ep_words.h, defines EpAt (a place in a rank's window, which only the verbs can find), includes this, and defines the
 * verbs. Kernels reach a peer by them and by nothing else. The rules are those of ep_core::port:
 *
 *   F1 exact    a put changes the bytes that it names and no others
 *   F3 signal   what threads have put is announced by one of them: all wait until their bulk puts are complete (ep_bulk_...), meet (a barrier of
 *               the warp or block), and then one thread fences (ep_fence_sys) and publishes
 *   F4 counters one warp or block posts to a lane, and one thread of it publishes
 *   F5 reuse    the source of a bulk put may be read until ep_bulk_wait_read; others have read theirs when they return
 *   F6 bounded  a wait ends by the deadline. When it is up, or a peer has given up, it reports once and returns false, and so does every
 *               later wait of the rank: all roles run to their end, and no kernel traps
 *   F8 checked  what a peer names (a note) is compared with its window before it is used (ep_is_within)
 *   F9 credit   reads of all threads, a barrier, ep_fence_sys, then the credit's publish
 *   F10 get     gets come after the wait that announced what they read, and a barrier where another thread waited
 *   F11 units   12 bytes of data and a tag are stored by one store of 16 bytes, relaxed and at the system's scope, and polled by one such load.
 *               So a unit is seen whole or not at all, and its data are there when its tag is. Nothing else is ordered: a payload has come
 *               when all of its units have, and no fence, no flag and no publish belongs to it. What a thread has polled before it stores a
 *               unit may be overwritten by whoever polls that unit: the store waits for the compared tags. For reads of other threads, a
 *               barrier first. A capability: a device whose loads and stores of 16 bytes are single defines EP_HAS_UNITS.
 *               Memory for units holds nothing else and is zeroed once; no tag repeats in it (ep_unit_tag)
 *
 * A rank's own window is its own memory (ep_own): kernels read and write it as they like.
 */
#ifndef EP_VERBS_H
#define EP_VERBS_H
#include "ep_words.h"

/* ---- places: by any thread ---- */

/* Whether a rank takes part: it is not masked. */
EP_DEV bool ep_takes_part(const EpRank& r, ep_u32 rank);
/* The place at this offset of a rank's window. The rank takes part. */
EP_DEV EpAt ep_at(const EpRank& r, ep_u32 rank, ep_u64 offset);
/* A place in the own memory, to be read as those of others are. */
EP_DEV EpAt ep_here(ep_u64 address);
/* No place. */
EP_DEV EpAt ep_nowhere();
EP_DEV bool ep_is_somewhere(EpAt at);

/* ---- put and get: by one thread each; places are multiples of what is put ---- */

EP_DEV void ep_put16(EpAt to, EpUnit unit);
EP_DEV void ep_put4(EpAt to, ep_u32 word);
EP_DEV void ep_put1(EpAt to, unsigned char byte);
/* A message of the layout, in pieces of any size. */
template <class T> EP_DEV void ep_put_message(EpAt to, const T& message);
/* Bytes of the block's shared memory, by the copy engine where the device has one. Completes as ep_bulk_... say. A multiple of 16 bytes. */
EP_DEV void ep_put_bulk(EpAt to, const void* shared, ep_u32 bytes);
EP_DEV EpUnit ep_get16(EpAt from);
EP_DEV ep_u32 ep_get4(EpAt from);
EP_DEV unsigned char ep_get1(EpAt from);

/* ---- fetch: a get into the block's shared memory that the thread does not wait for; places are multiples of what is fetched ---- */

EP_DEV void ep_fetch16(void* shared, EpAt from);
EP_DEV void ep_fetch4(void* shared, EpAt from);
/* Ends a fetch, of none or of many places. */
EP_DEV void ep_fetch_end();
/* Waits until all of the thread's fetches have come but the last `pending` of those that ended. They have come for that thread; for others of its warp when
   these have met it. */
template <int pending> EP_DEV void ep_fetch_wait();

#ifdef EP_HAS_UNITS
/* ---- units: by one thread each; places are multiples of 16 ---- */

/* Stores a unit: three words of data, and the tag of the operation. */
EP_DEV void ep_put_unit(EpAt to, ep_u32 x, ep_u32 y, ep_u32 z, ep_u32 tag);
/* Looks at the unit at this address of the own window; whether it bears the tag. Then data holds its three words. */
EP_DEV bool ep_poll_unit(const void* at, ep_u32 tag, ep_u32* data);
#endif

/* ---- publish, peek, wait: by one thread ---- */

/* Raises the cell at this offset of peer's window, which belongs to lane. Everything that it announces was ordered before. */
EP_DEV void ep_raise(const EpRank& r, ep_u32 peer, ep_u32 lane, ep_u64 cell, ep_u64 value);
/* Raises this rank's cell of a lane's counter. */
EP_DEV void ep_publish(const EpRank& r, ep_u32 peer, ep_u32 lane, ep_u32 counter, ep_u64 value);
/* The value of the cell at this offset of the own window; what was put before it was raised is visible to the thread, and after a barrier to
   those that join it. */
EP_DEV ep_u64 ep_look(const EpRank& r, ep_u64 cell);
/* The value of writer's cell of a lane's counter. */
EP_DEV ep_u64 ep_peek(const EpRank& r, ep_u32 writer, ep_u32 lane, ep_u32 counter);
/* Waits until that is at least at_least; false when that will not happen. `began`: ep_now() at the kernel's start. */
EP_DEV bool ep_wait(const EpRank& r, ep_u32 writer, ep_u32 lane, ep_u32 counter, ep_u64 at_least, ep_u32 phase, ep_u64 began);

#endif
