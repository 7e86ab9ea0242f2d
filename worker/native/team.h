// Threads that run the phases of a step together: items of a phase are handed out one by one, and the next phase begins
// when all of them are done.
//
// A phase waits for its items, never for its threads: one that the system has put aside finds, when it comes back, that
// the others are further on, and follows. Waiting is our own too: OpenMP's either spins for milliseconds, which beside
// other load makes steps many times slower, or sleeps at once, which costs a wake-up a phase. Here a thread spins for
// about as long as a phase takes, then sleeps.
#pragma once

#include <immintrin.h>

#include <atomic>
#include <cstdint>

// What the threads of one step share.
struct Team {
    const int size;
    // Number of the phase (upper half) and of its next item (lower half).
    alignas(64) std::atomic<uint64_t> next{0};
    alignas(64) std::atomic<int> num_done{0};
    // The phase again, for those who wait: it follows `next`.
    alignas(64) std::atomic<int> phase{0};
};

// One thread of a team. All of them go through the same phases, in the same order.
class Member {
   public:
    explicit Member(Team& team) : team_(team) {}

    int team_size() const { return team_.size; }

    // Runs `item(i)` for every i below `count`, each on one of the threads, and returns when all are done.
    template <class Item>
    void each(int count, Item item) {
        if (count == 0) return;
        const int phase = phase_++;
        uint64_t next = team_.next.load(std::memory_order_acquire);
        while (static_cast<int>(next >> 32) == phase) {
            const int index = static_cast<int>(next & 0xFFFFFFFF);
            if (index >= count) return wait(phase);
            if (!team_.next.compare_exchange_weak(next, next + 1, std::memory_order_acq_rel)) continue;
            item(index);
            if (team_.num_done.fetch_add(1, std::memory_order_acq_rel) == count - 1) return begin(phase + 1);
            next = team_.next.load(std::memory_order_acquire);
        }
    }

   private:
    static constexpr int NUM_SPINS = 2000;

    void begin(int phase) {
        team_.num_done.store(0, std::memory_order_relaxed);
        team_.next.store(static_cast<uint64_t>(phase) << 32, std::memory_order_release);
        team_.phase.store(phase, std::memory_order_release);
        team_.phase.notify_all();
    }

    void wait(int phase) {
        for (int spin = 0; spin < NUM_SPINS; ++spin) {
            if (team_.phase.load(std::memory_order_acquire) > phase) return;
            _mm_pause();
        }
        for (int now; (now = team_.phase.load(std::memory_order_acquire)) <= phase;) team_.phase.wait(now);
    }

    Team& team_;
    int phase_ = 0;
};
