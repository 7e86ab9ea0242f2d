// Threads that run the phases of a step together: items of a phase are handed out one by one, and nobody enters the
// next phase before all have left this one.
//
// OpenMP's own waiting either spins for milliseconds or sleeps at once, as the process was started. Beside other load
// the first makes steps many times slower, the second costs a wake-up a phase. Here a thread spins for about as long
// as a phase takes, then sleeps.
#pragma once

#include <immintrin.h>

#include <atomic>

class Team {
   public:
    explicit Team(int size) : size_(size) {}

    // Runs `item(i)` for every i below `count`, on whichever thread is free, and returns when all are done. All
    // threads of the team call it with the same arguments.
    template <class Item>
    void each(int count, Item item) {
        for (int index; (index = next_.fetch_add(1, std::memory_order_relaxed)) < count;) item(index);
        wait();
    }

   private:
    static constexpr int NUM_SPINS = 2000;

    void wait() {
        const int phase = phase_.load(std::memory_order_relaxed);
        if (arrived_.fetch_add(1, std::memory_order_acq_rel) == size_ - 1) {
            arrived_.store(0, std::memory_order_relaxed);
            next_.store(0, std::memory_order_relaxed);
            phase_.store(phase + 1, std::memory_order_release);
            phase_.notify_all();
            return;
        }
        for (int spin = 0; spin < NUM_SPINS; ++spin) {
            if (phase_.load(std::memory_order_acquire) != phase) return;
            _mm_pause();
        }
        phase_.wait(phase, std::memory_order_acquire);
    }

    const int size_;
    alignas(64) std::atomic<int> next_{0};
    alignas(64) std::atomic<int> arrived_{0};
    alignas(64) std::atomic<int> phase_{0};
};
