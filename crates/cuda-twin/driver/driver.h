/*
 * driver.h: what the files of the twin's driver have in common. Numbers and structs are the driver API's own, of CUDA 13.
 */
#ifndef TWIN_DRIVER_H
#define TWIN_DRIVER_H
#include <cstddef>
#include <cstdint>
#include <cstdio>

#define TWIN extern "C" __attribute__((visibility("default")))

namespace twin {

/* CUresult. */
enum Result {
    kSuccess = 0,
    kInvalidValue = 1,
    kOutOfMemory = 2,
    kInvalidDevice = 101,
    kInvalidImage = 200,
    kPeerAccessAlreadyEnabled = 704,
    kIllegalState = 401,
    kNotFound = 500,
    kNotReady = 600,
    kAlreadyRegistered = 712,
    kNotRegistered = 713,
    kLaunchTooLarge = 720,
    kNotSupported = 801,
    kCaptureUnsupported = 900,
    kCaptureInvalidated = 901,
    kCaptureIsolation = 905,
    kCapturedEvent = 907,
    kCaptureWrongThread = 908,
};

/* The GPUs that it shows: as many as EP_CUDA_TWIN_GPUS says, and like small ones of compute capability 8.0. */
int gpus();
constexpr int kMajor = 8, kMinor = 0, kMultiprocessors = 32, kSharedMemory = 99 << 10;
constexpr std::size_t kMemory = 16ull << 30;

/* A descriptor of the block that begins there, of its first bytes at least; -1 where none does. The caller's to close. */
int descriptor(std::uint64_t at, std::size_t bytes);

/* Returns when all kernels that run have ended. No other is launched meanwhile. */
void wait_for_launches();

/* Bytes of memory made piece by piece that live. */
std::size_t living_pages();

/* What the twin has not. */
inline Result refuse(const char* what) {
    std::fprintf(stderr, "the twin of a GPU has no %s\n", what);
    return kNotSupported;
}

} /* namespace twin */
#endif
