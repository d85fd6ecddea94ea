/*
 * graph.cpp: captures of streams, graphs of what was captured, and what graphs keep. A capture is of one stream: no other joins it.
 */
#include <atomic>
#include <mutex>
#include <set>

#include "capture.h"
#include "stream.h"

namespace twin {
namespace {

/* Of the streams that are captured, and of all that captures have. */
std::mutex mutex;
std::set<Stream*> captured;
std::uint64_t captures = 0;

thread_local Mode mode_of_thread = kGlobal;

/* CUuserObject: told when nobody has it any more. */
struct Object {
    void* what;
    void (*gone)(void*);
    std::atomic<unsigned> references;

    void release(unsigned count) {
        if (references.fetch_sub(count) != count) return;
        /* As of the driver: by a thread of its own, which must not call the driver. */
        std::thread([gone = gone, what = what] { gone(what); }).detach();
        delete this;
    }
};

/* CUgraphExec. Its runs follow each other, on whatever streams. */
struct Executable {
    std::shared_ptr<const Body> body;
    std::shared_ptr<Place> last;
};

} /* namespace */

bool Stream::captures(std::function<void()>& work) {
    if (!is_captured_) return false;
    std::lock_guard<std::mutex> lock(mutex);
    if (!capture_) return false;
    capture_->graph->body->work.push_back(std::move(work));
    return true;
}
std::uint64_t capture_of(Stream& stream) {
    std::lock_guard<std::mutex> lock(mutex);
    return stream.capture_ ? stream.capture_->id : 0;
}
Result not_in_capture(Stream& stream) {
    std::lock_guard<std::mutex> lock(mutex);
    if (!stream.capture_) return kSuccess;
    stream.capture_->is_broken = true;
    return kCaptureUnsupported;
}
Result not_beside_capture() {
    if (mode_of_thread == kRelaxed) return kSuccess;
    std::lock_guard<std::mutex> lock(mutex);
    Result result = kSuccess;
    for (Stream* stream : captured) {
        Capture& capture = *stream->capture_;
        const bool is_own = capture.thread == std::this_thread::get_id();
        const bool hinders = is_own ? capture.mode != kRelaxed : capture.mode == kGlobal && mode_of_thread == kGlobal;
        if (!hinders) continue;
        capture.is_broken = true;
        result = kCaptureUnsupported;
    }
    return result;
}

} /* namespace twin */

using namespace twin;

/* ---- captures ---- */

TWIN int cuThreadExchangeStreamCaptureMode(Mode* mode) {
    std::swap(*mode, mode_of_thread);
    return kSuccess;
}
TWIN int cuStreamBeginCapture_v2(Stream* handle, Mode mode) {
    if (!handle) return kCaptureUnsupported; /* the default stream */
    std::lock_guard<std::mutex> lock(mutex);
    if (handle->capture_) return kIllegalState;
    handle->capture_.reset(new Capture{++captures, mode, std::this_thread::get_id()});
    handle->is_captured_ = true;
    captured.insert(handle);
    return kSuccess;
}
TWIN int cuStreamEndCapture(Stream* handle, Graph** graph) {
    *graph = nullptr;
    if (!handle) return kIllegalState;
    std::unique_ptr<Capture> ended;
    std::lock_guard<std::mutex> lock(mutex);
    if (!handle->capture_) return kIllegalState;
    if (handle->capture_->mode != kRelaxed && handle->capture_->thread != std::this_thread::get_id()) return kCaptureWrongThread;
    ended.swap(handle->capture_);
    handle->is_captured_ = false;
    captured.erase(handle);
    if (ended->is_broken) return kCaptureInvalidated;
    *graph = ended->graph.release();
    return kSuccess;
}
TWIN int cuStreamGetCaptureInfo_v3(Stream* handle, int* status, std::uint64_t* id, Graph** graph, const void***, const void**, std::size_t*) {
    Stream& stream = stream_of(handle);
    std::lock_guard<std::mutex> lock(mutex);
    *status = !stream.capture_ ? 0 : stream.capture_->is_broken ? 2 : 1;
    if (*status != 1) return kSuccess;
    if (id) *id = stream.capture_->id;
    if (graph) *graph = stream.capture_->graph.get();
    return kSuccess;
}
TWIN int cuStreamIsCapturing(Stream* stream, int* status) {
    return cuStreamGetCaptureInfo_v3(stream, status, nullptr, nullptr, nullptr, nullptr, nullptr);
}

/* ---- graphs ---- */

TWIN int cuGraphInstantiateWithFlags(Executable** out, Graph* graph, unsigned long long) {
    *out = new Executable{graph->body, nullptr};
    return kSuccess;
}
TWIN int cuGraphDestroy(Graph* graph) {
    delete graph;
    return kSuccess;
}
TWIN int cuGraphExecDestroy(Executable* executable) {
    delete executable;
    return kSuccess;
}
TWIN int cuGraphUpload(Executable*, Stream*) { return kSuccess; }
TWIN int cuGraphLaunch(Executable* executable, Stream* handle) {
    Stream& stream = stream_of(handle);
    if (not_in_capture(stream) != kSuccess) return refuse("graphs within graphs");
    const auto own = std::make_shared<Place>();
    stream.enqueue([body = executable->body, before = executable->last, own] {
        if (before) before->wait();
        for (const auto& work : body->work) work();
        own->arrive();
    });
    executable->last = own;
    return kSuccess;
}

/* ---- what graphs keep ---- */

TWIN int cuUserObjectCreate(Object** out, void* what, void (*gone)(void*), unsigned references, unsigned) {
    *out = new Object{what, gone, {references}};
    return kSuccess;
}
TWIN int cuUserObjectRelease(Object* object, unsigned count) {
    object->release(count);
    return kSuccess;
}
TWIN int cuGraphRetainUserObject(Graph* graph, Object* object, unsigned count, unsigned moves) {
    if (!moves) object->references += count;
    std::lock_guard<std::mutex> lock(mutex);
    graph->body->kept.emplace_back(nullptr, [object, count](void*) { object->release(count); });
    return kSuccess;
}
