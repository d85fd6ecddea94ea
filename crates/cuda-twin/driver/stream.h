/*
 * stream.h: streams of the twin: queues of work in order, each with a thread of its own; and events.
 */
#ifndef TWIN_STREAM_H
#define TWIN_STREAM_H
#include <atomic>
#include <condition_variable>
#include <deque>
#include <functional>
#include <memory>
#include <mutex>
#include <thread>

#include "capture.h"

namespace twin {

/* A place in a stream: whether it was come to, and when. */
struct Place {
    std::mutex mutex;
    std::condition_variable come;
    bool is_there = false;
    std::uint64_t at = 0; /* nanoseconds */

    void arrive();
    void wait();
};

/* An event names the place where it was recorded last, or the capture in which it was: there it comes when a graph runs, and nobody outside may ask. */
struct Event {
    std::mutex mutex;
    std::shared_ptr<Place> place;
    std::uint64_t capture = 0;

    std::shared_ptr<Place> now() {
        std::lock_guard<std::mutex> lock(mutex);
        return place;
    }
    /* The capture that it is of; 0 for none. */
    std::uint64_t captured_in() {
        std::lock_guard<std::mutex> lock(mutex);
        return capture;
    }
};

class Stream {
public:
    Stream() : thread_([this] { run(); }) {}
    /* Lets it run when all before it has ended; or, while the stream is captured, whenever a graph of that runs. */
    void enqueue(std::function<void()> work);
    /* The same of work that takes no time and waits for nobody: mostly done at once where the stream is idle, as a thread that must be woken for each copy
       keeps whoever waits for it, on a busy processor for long. */
    void enqueue_light(std::function<void()> work);
    /* Whether all work that was enqueued has ended. */
    bool is_idle();
    /* Lets its work end, and then its thread; nobody enqueues any more. */
    static void retire(Stream* stream);

    /* Of graph.cpp, under its lock. */
    std::unique_ptr<Capture> capture_;
    /* So that who is not captured need not take that lock. */
    std::atomic<bool> is_captured_{false};

private:
    void run();
    /* Whether the work goes to a capture: then it is there. */
    bool captures(std::function<void()>& work);

    std::mutex mutex_;
    std::condition_variable more_;
    std::deque<std::function<void()>> work_;
    bool is_busy_ = false, ends_ = false;
    std::thread thread_;
};

/* The stream of this handle; 0 is the default stream. */
Stream& stream_of(Stream* handle);

} /* namespace twin */
#endif
