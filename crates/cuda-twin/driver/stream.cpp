/*
 * stream.cpp: streams, events, and work that needs no kernel: copies and fills.
 */
#include "stream.h"

#include <chrono>
#include <cstring>

namespace twin {

void Place::arrive() {
    std::lock_guard<std::mutex> lock(mutex);
    is_there = true;
    at = (std::uint64_t)std::chrono::steady_clock::now().time_since_epoch().count();
    come.notify_all();
}
void Place::wait() {
    std::unique_lock<std::mutex> lock(mutex);
    come.wait(lock, [this] { return is_there; });
}

void Stream::enqueue(std::function<void()> work) {
    if (captures(work)) return;
    std::lock_guard<std::mutex> lock(mutex_);
    work_.push_back(std::move(work));
    more_.notify_one();
}
void Stream::enqueue_light(std::function<void()> work) {
    if (captures(work)) return;
    static std::atomic<unsigned> drawn{0};
    std::unique_lock<std::mutex> lock(mutex_);
    if (!work_.empty() || is_busy_ || drawn++ % 8 == 7) {
        work_.push_back(std::move(work));
        more_.notify_one();
        return;
    }
    is_busy_ = true;
    lock.unlock();
    work();
    lock.lock();
    is_busy_ = false;
    /* For what has come meanwhile. */
    if (!work_.empty() || ends_) more_.notify_one();
}
bool Stream::is_idle() {
    std::lock_guard<std::mutex> lock(mutex_);
    return work_.empty() && !is_busy_;
}
void Stream::retire(Stream* stream) {
    stream->thread_.detach();
    std::lock_guard<std::mutex> lock(stream->mutex_);
    stream->ends_ = true;
    stream->more_.notify_one();
}
void Stream::run() {
    for (std::unique_lock<std::mutex> lock(mutex_);;) {
        more_.wait(lock, [this] { return !is_busy_ && (ends_ || !work_.empty()); });
        if (work_.empty()) return; /* Its memory stays: a stream is small. */
        const auto work = std::move(work_.front());
        work_.pop_front();
        is_busy_ = true;
        lock.unlock();
        work();
        lock.lock();
        is_busy_ = false;
    }
}

Stream& stream_of(Stream* handle) {
    static Stream& first = *new Stream;
    return handle ? *handle : first;
}

namespace {

void copy(void* to, const void* from, std::size_t bytes, Stream* stream) {
    stream_of(stream).enqueue_light([=] { std::memcpy(to, from, bytes); });
}

/* CUDA_MEMCPY2D; rows of device memory are all that the twin copies by it. */
struct Copy2D {
    std::size_t from_x, from_y;
    int from_type;
    const void* from_host;
    std::uint64_t from;
    void* from_array;
    std::size_t from_pitch;
    std::size_t to_x, to_y;
    int to_type;
    void* to_host;
    std::uint64_t to;
    void* to_array;
    std::size_t to_pitch;
    std::size_t width, rows;
};
constexpr int kDeviceMemory = 2;

} /* namespace */
} /* namespace twin */

using namespace twin;

/* ---- streams ---- */

TWIN int cuStreamCreateWithPriority(Stream** out, unsigned, int) {
    *out = new Stream;
    return kSuccess;
}
TWIN int cuStreamDestroy_v2(Stream* stream) {
    Stream::retire(stream);
    return kSuccess;
}
TWIN int cuStreamQuery(Stream* stream) {
    if (not_in_capture(stream_of(stream)) != kSuccess || not_beside_capture() != kSuccess) return kCaptureUnsupported;
    return stream_of(stream).is_idle() ? kSuccess : kNotReady;
}

/* ---- events ---- */

TWIN int cuEventCreate(Event** out, unsigned) {
    *out = new Event;
    return kSuccess;
}
TWIN int cuEventDestroy_v2(Event* event) {
    delete event;
    return kSuccess;
}
TWIN int cuEventRecord(Event* event, Stream* stream) {
    const std::uint64_t capture = capture_of(stream_of(stream));
    const auto place = capture ? nullptr : std::make_shared<Place>();
    {
        std::lock_guard<std::mutex> lock(event->mutex);
        event->place = place;
        event->capture = capture;
    }
    if (place) stream_of(stream).enqueue_light([place] { place->arrive(); });
    return kSuccess;
}
TWIN int cuEventQuery(Event* event) {
    if (not_beside_capture() != kSuccess) return kCaptureUnsupported;
    const auto place = event->now();
    if (event->captured_in()) return kCapturedEvent;
    if (!place) return kSuccess;
    std::lock_guard<std::mutex> lock(place->mutex);
    return place->is_there ? kSuccess : kNotReady;
}
TWIN int cuEventElapsedTime_v2(float* milliseconds, Event* from, Event* to) {
    const auto first = from->now(), last = to->now();
    if (!first || !last) return kInvalidValue;
    *milliseconds = (float)((double)(last->at - first->at) / 1e6);
    return kSuccess;
}
TWIN int cuStreamWaitEvent(Stream* stream, Event* event, unsigned) {
    const std::uint64_t of = event->captured_in(), here = capture_of(stream_of(stream));
    if (of != 0 && of == here) return kSuccess; /* Work of one stream comes in order. */
    if (of != 0) return refuse("captures of more than one stream");
    const auto place = event->now();
    if (place && here != 0) {
        not_in_capture(stream_of(stream));
        return kCaptureIsolation;
    }
    if (place) stream_of(stream).enqueue([place] { place->wait(); });
    return kSuccess;
}

/* ---- copies and fills ---- */

TWIN int cuMemcpyHtoDAsync_v2(std::uint64_t to, const void* from, std::size_t bytes, Stream* stream) {
    copy((void*)to, from, bytes, stream);
    return kSuccess;
}
TWIN int cuMemcpyDtoHAsync_v2(void* to, std::uint64_t from, std::size_t bytes, Stream* stream) {
    copy(to, (const void*)from, bytes, stream);
    return kSuccess;
}
TWIN int cuMemcpyDtoDAsync_v2(std::uint64_t to, std::uint64_t from, std::size_t bytes, Stream* stream) {
    copy((void*)to, (const void*)from, bytes, stream);
    return kSuccess;
}
TWIN int cuMemcpy2DAsync_v2(const Copy2D* copy, Stream* stream) {
    const Copy2D c = *copy;
    if (c.from_type != kDeviceMemory || c.to_type != kDeviceMemory || c.from_x || c.from_y || c.to_x || c.to_y)
        return refuse("copies of rows but between device memories");
    stream_of(stream).enqueue_light([c] {
        for (std::size_t row = 0; row < c.rows; ++row)
            std::memcpy((char*)c.to + row * c.to_pitch, (const char*)c.from + row * c.from_pitch, c.width);
    });
    return kSuccess;
}
TWIN int cuStreamWriteValue64_v2(Stream* stream, std::uint64_t at, std::uint64_t value, unsigned) {
    stream_of(stream).enqueue_light([=] { __atomic_store_n((std::uint64_t*)at, value, __ATOMIC_RELEASE); });
    return kSuccess;
}
/* Of these only stores of eight bytes. */
struct MemOp {
    unsigned operation;
    std::uint64_t address, value;
    unsigned flags;
    std::uint64_t alias, rest;
};
static_assert(sizeof(MemOp) == 48, "as the driver's CUstreamBatchMemOpParams");
constexpr unsigned kWriteValue64 = 5;
TWIN int cuStreamBatchMemOp_v2(Stream* stream, unsigned count, const MemOp* asked, unsigned) {
    std::vector<std::pair<std::uint64_t, std::uint64_t>> words;
    for (unsigned i = 0; i < count; ++i) {
        if (asked[i].operation != kWriteValue64 || asked[i].flags != 0) return kInvalidValue;
        words.emplace_back(asked[i].address, asked[i].value);
    }
    stream_of(stream).enqueue_light([=] {
        for (const auto& [at, value] : words) __atomic_store_n((std::uint64_t*)at, value, __ATOMIC_RELEASE);
    });
    return kSuccess;
}
TWIN int cuMemsetD8Async(std::uint64_t at, unsigned char byte, std::size_t bytes, Stream* stream) {
    stream_of(stream).enqueue_light([=] { std::memset((void*)at, byte, bytes); });
    return kSuccess;
}
