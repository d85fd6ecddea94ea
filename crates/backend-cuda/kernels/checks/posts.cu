/*
 * ep_posts_kernel: posts to one lane between nodes and does nothing else: what the device half of a transport does is tested, and measured, by
 * itself.
 *
 *   launch   a block of a warp, whose first thread posts
 *   memory   the lane's state; what it posts about lies in windows, which it does not touch
 */
#include "ep_device.h"
#include "ep_args.h"
#include "ep_far_lanes.h"

EP_KERNEL(32) ep_posts_kernel(EP_GIVEN(EpPostsArgs) a) {
    if (ep_thread() != 0) return;
    const EpFar lane = {a.lane};
    const ep_u64 began = ep_now(), until = began + a.allowed;
    ep_u64 ticket = 0;
    ep_u32 status = EP_FAR_OK;
    for (ep_u64 put = 0; put < a.puts && status == EP_FAR_OK; ++put) {
        const ep_u64 at = put % a.places * a.bytes;
        status = ep_far_put(lane, a.from + at, a.to + at, a.bytes, until, &ticket);
        if (status == EP_FAR_OK && (put + 1) % a.every == 0) status = ep_far_publish(lane, a.cell, a.published + put + 1, until);
        if (status == EP_FAR_OK && a.waits) status = ep_far_flush(lane, ticket, until);
    }
    if (status == EP_FAR_OK) status = ep_far_flush(lane, ticket, until);
    ep_u64* out = (ep_u64*)a.out;
    out[1] = ep_now() - began;
    ep_fence_sys();
    ep_st_release(out, status);
}
