/*
 * capture.h: captures of streams, and what they forbid.
 */
#ifndef TWIN_CAPTURE_H
#define TWIN_CAPTURE_H
#include <functional>
#include <memory>
#include <thread>
#include <vector>

#include "driver.h"

namespace twin {

/* CUstreamCaptureMode. */
enum Mode { kGlobal = 0, kThreadLocal = 1, kRelaxed = 2 };

/* What was captured: work in order, and what lives as long as this does. */
struct Body {
    std::vector<std::function<void()>> work;
    std::vector<std::shared_ptr<void>> kept;
};

/* CUgraph. */
struct Graph {
    std::shared_ptr<Body> body = std::make_shared<Body>();
};

/* A capture of one stream. */
struct Capture {
    std::uint64_t id;
    Mode mode;
    std::thread::id thread;
    std::unique_ptr<Graph> graph = std::make_unique<Graph>();
    /* Something was asked for that a capture forbids: no graph comes of it. */
    bool is_broken = false;
};

class Stream;

/* The capture of a stream, if it is under way: its number, and 0 where there is none. */
std::uint64_t capture_of(Stream& stream);

/* Refuses a call on a stream while that is captured, and breaks the capture: what it answers, and success where there is none. */
Result not_in_capture(Stream& stream);

/* Refuses a call that might be meant for a capture, on whatever stream: where this thread captures, or anybody does in global mode, unless this thread
   has said that it means none (cuThreadExchangeStreamCaptureMode). Breaks those captures. */
Result not_beside_capture();

} /* namespace twin */
#endif
