/* The sum of a tensor over the ranks of one instance, which are processes on one host and share this memory:

       lines   | rank 0 | rank 1 | ... | abort |     a counter each, 64 bytes apart: pieces that the rank has written
       slots   | even pieces: rank 0, rank 1, ... | odd pieces: rank 0, rank 1, ... |

   Each rank writes its piece, waits for the others' and sums them itself, in the order of ranks, so that all ranks have
   the same bits. A slot is reused two pieces later: every rank has then written the piece in between, and so has read
   the older one. */

#define _POSIX_C_SOURCE 200809L

#include <sched.h>
#include <stdatomic.h>
#include <stdint.h>
#include <string.h>
#include <time.h>

#define LINE_BYTES 64
#define PAGE_BYTES 4096

enum { DONE = 0, LATE = 1, ABORTED = 2 };
enum { SPINS = 200, YIELDS = 2000, PAUSE_NS = 20000 };

typedef _Atomic uint64_t counter;

static counter *line(unsigned char *shared, uint32_t number) {
    return (counter *)(shared + (uint64_t)number * LINE_BYTES);
}

static double now_s(void) {
    struct timespec time;
    clock_gettime(CLOCK_MONOTONIC, &time);
    return (double)time.tv_sec + (double)time.tv_nsec * 1e-9;
}

/* Wait until *seen reaches `wanted`: spin briefly, then yield, then sleep. */
static int32_t wait_for(counter *seen, uint64_t wanted, counter *aborted, double deadline_s) {
    const struct timespec pause = {0, PAUSE_NS};
    for (uint32_t turn = 0; atomic_load_explicit(seen, memory_order_acquire) < wanted; turn++) {
        if (turn < SPINS) continue;
        if (atomic_load_explicit(aborted, memory_order_relaxed)) return ABORTED;
        if (turn < YIELDS) {
            sched_yield();
            continue;
        }
        if (now_s() > deadline_s) return LATE;
        nanosleep(&pause, 0);
    }
    return DONE;
}

/* Sum `count` floats at `data` over all ranks, in place. Every rank calls it with the same count. */
int32_t native_sum(unsigned char *shared, uint32_t rank, uint32_t num_ranks, uint64_t slot_bytes, float *data,
                   uint64_t count, double timeout_s) {
    uint64_t lines = ((uint64_t)(num_ranks + 1) * LINE_BYTES + PAGE_BYTES - 1) / PAGE_BYTES * PAGE_BYTES;
    uint64_t most = slot_bytes / sizeof(float);
    counter *own = line(shared, rank), *aborted = line(shared, num_ranks);
    double deadline_s = now_s() + timeout_s;
    for (uint64_t first = 0; first < count; first += most) {
        uint64_t piece = count - first < most ? count - first : most;
        uint64_t number = atomic_load_explicit(own, memory_order_relaxed);
        unsigned char *slots = shared + lines + (number & 1) * num_ranks * slot_bytes;
        memcpy(slots + rank * slot_bytes, data + first, piece * sizeof(float));
        atomic_store_explicit(own, number + 1, memory_order_release);
        for (uint32_t other = 0; other < num_ranks; other++) {
            int32_t failed = wait_for(line(shared, other), number + 1, aborted, deadline_s);
            if (failed) return failed;
            const float *theirs = (const float *)(slots + other * slot_bytes);
            float *sum = data + first;
            if (other == 0) {
                memcpy(sum, theirs, piece * sizeof(float));
            } else {
                for (uint64_t i = 0; i < piece; i++) sum[i] += theirs[i];
            }
        }
    }
    return DONE;
}
