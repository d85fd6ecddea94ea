/*
 * ep_far_lanes.h: no lanes between nodes. Where there are such, the text of their transport is found under this name
 * (ep_core::transport::DeviceSource); it includes ep_far.h, by which kernels know.
 */
