/*
 * ep_state.h: one rank as its kernels see it, what they keep between launches, and what they report.
 *
 * Written by ep_core::device::headers(); do not edit. A test fails when this file is stale and says how to renew it.
 *
 * Addresses are the device's, as numbers: a kernel makes pointers of them in its own way.
 */
#ifndef EP_STATE_H
#define EP_STATE_H
#include "ep_layout.h"
