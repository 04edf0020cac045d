#define _GNU_SOURCE
#include "threads.h"

#include <limits.h>
#include <linux/futex.h>
#include <pthread.h>
#include <sched.h>
#include <signal.h>
#include <stdatomic.h>
#include <stdlib.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

enum { LINE = 64, PAUSES_A_LOOK = 16 };
enum { SPIN_MOST_NS = 50000, SPIN_MORE_NS = 1000, SPIN_LESS = 4, HELD_UP_NS = 20000 };

/* State of a worker in a region: IDLE -> CALLED (by the caller) -> WORKING (by the worker) -> IDLE (by the worker)
 *                                          CALLED -> IDLE (by a caller who does not need it any more)             */
enum state { IDLE, CALLED, WORKING, CLOSING };

/* How many nanoseconds waits of one kind spin: SPIN_MORE_NS longer after a wait for which spinning paid, or would have,
 * and a SPIN_LESS-th as long after one for which it did not. If one in 50 is in vain they spin for up to
 * SPIN_MOST_NS, if one in 10 is, for up to 12 us, if half of them are, for 1 us. */
typedef _Atomic int64_t patience;

struct worker {
    _Alignas(LINE) _Atomic uint32_t state;
    pthread_t thread;
    struct threads *team;
    int number;
};

struct threads {
    _Alignas(LINE) pthread_mutex_t caller; /* held for the length of a region */
    region_function *region;
    void *context;
    int count, oversubscribed;
    enum isa isa;
    pid_t owner;
    _Alignas(LINE) _Atomic uint32_t arrived;
    _Alignas(LINE) _Atomic uint32_t passed; /* rounds of the barrier; starts anew after 2^32 */
    _Alignas(LINE) _Atomic int sleepers; /* threads that sleep, or are about to */
    _Alignas(LINE) patience between, within; /* regions */
    struct worker workers[];
};

static inline void pause_a_little(void) {
#if defined(__x86_64__)
    __builtin_ia32_pause();
#elif defined(__aarch64__)
    __asm__ volatile("isb" ::: "memory");
#endif
}

static int64_t now_ns(void) {
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return (int64_t)now.tv_sec * 1000000000 + now.tv_nsec;
}

/* Wake the threads that sleep until *value changes; call after changing it. */
static void wake(struct threads *threads, _Atomic uint32_t *value) {
    if (atomic_load(&threads->sleepers) != 0) syscall(SYS_futex, value, FUTEX_WAKE_PRIVATE, INT_MAX, NULL, NULL, 0);
}

static uint32_t sleep_until_change(struct threads *threads, _Atomic uint32_t *value, uint32_t old) {
    uint32_t found;
    atomic_fetch_add(&threads->sleepers, 1);
    while ((found = atomic_load(value)) == old) syscall(SYS_futex, value, FUTEX_WAIT_PRIVATE, old, NULL, NULL, 0);
    atomic_fetch_sub(&threads->sleepers, 1);
    return found;
}

static void learn(patience *patience, int64_t spin_ns, int paid) {
    int64_t learnt = paid ? spin_ns + SPIN_MORE_NS : spin_ns / SPIN_LESS;
    if (learnt > SPIN_MOST_NS) learnt = SPIN_MOST_NS;
    if (learnt != spin_ns) atomic_store_explicit(patience, learnt, memory_order_relaxed);
}

/* Spin until *value is not `old`, the time is over, or this thread was interrupted: another needs its core. Return the
 * start time, 0 if the change came at once. */
static int64_t spin(_Atomic uint32_t *value, uint32_t old, int64_t spin_ns) {
    int64_t began = 0, before = 0;
    for (;;) {
        for (int i = 0; i < PAUSES_A_LOOK; i++) {
            if (atomic_load_explicit(value, memory_order_acquire) != old) return began;
            pause_a_little();
        }
        int64_t now = now_ns();
        if (began == 0) began = before = now;
        if (now - began >= spin_ns || now - before > HELD_UP_NS) return began;
        before = now;
    }
}

/* Wait until *value is not `old`: spin first, then sleep. Return the new value.
 *
 * Spinning pays if it is shorter than falling asleep and waking up. With more threads than cores it takes a core from
 * another thread, perhaps the one it waits for. */
static uint32_t await_change(struct threads *threads, _Atomic uint32_t *value, uint32_t old, patience *patience) {
    int64_t spin_ns = atomic_load_explicit(patience, memory_order_relaxed);
    int64_t began = spin(value, old, threads->oversubscribed ? 0 : spin_ns);
    uint32_t found = atomic_load_explicit(value, memory_order_acquire);
    if (found != old) {
        learn(patience, spin_ns, 1);
        return found;
    }
    found = sleep_until_change(threads, value, old);
    learn(patience, spin_ns, now_ns() - began < SPIN_MOST_NS);
    return found;
}

static void *work(void *argument) {
    struct worker *worker = argument;
    struct threads *team = worker->team;
    for (;;) {
        uint32_t state = await_change(team, &worker->state, IDLE, &team->between);
        if (state == CLOSING) return NULL;
        uint32_t called = CALLED;
        if (!atomic_compare_exchange_strong(&worker->state, &called, WORKING)) continue; /* not needed any more */
        team->region(team->context, worker->number, team->count);
        atomic_store(&worker->state, IDLE);
        wake(team, &worker->state);
    }
}

/* Start a worker with all signals blocked except its own faults: the main thread handles the others. */
static int start(struct worker *worker) {
    static const int faults[] = {SIGSEGV, SIGBUS, SIGFPE, SIGILL, SIGABRT};
    sigset_t all, before;
    sigfillset(&all);
    for (size_t i = 0; i < sizeof faults / sizeof *faults; i++) sigdelset(&all, faults[i]);
    pthread_sigmask(SIG_SETMASK, &all, &before);
    int failed = pthread_create(&worker->thread, NULL, work, worker);
    pthread_sigmask(SIG_SETMASK, &before, NULL);
    return !failed;
}

static void end_workers(struct threads *threads, int started) {
    for (int i = 0; i < started; i++) {
        atomic_store(&threads->workers[i].state, CLOSING);
        wake(threads, &threads->workers[i].state);
    }
    for (int i = 0; i < started; i++) pthread_join(threads->workers[i].thread, NULL);
}

static int cpus_here(void) {
    cpu_set_t set;
    return sched_getaffinity(0, sizeof set, &set) == 0 ? CPU_COUNT(&set) : MAX_THREADS;
}

struct threads *threads_open(int count, enum isa isa) {
    if (count < 1 || count > MAX_THREADS || !isa_is_here(isa)) return NULL;
    size_t size = sizeof(struct threads) + (size_t)(count - 1) * sizeof(struct worker);
    struct threads *threads = aligned_alloc(LINE, (size + LINE - 1) / LINE * LINE);
    if (threads == NULL) return NULL;
    threads->count = count, threads->isa = isa, threads->owner = getpid();
    threads->oversubscribed = count > cpus_here();
    atomic_init(&threads->arrived, 0), atomic_init(&threads->passed, 0), atomic_init(&threads->sleepers, 0);
    pthread_mutex_init(&threads->caller, NULL);
    atomic_init(&threads->between, SPIN_MOST_NS), atomic_init(&threads->within, SPIN_MOST_NS);
    for (int i = 0; i < count - 1; i++) {
        struct worker *worker = &threads->workers[i];
        atomic_init(&worker->state, IDLE);
        worker->team = threads, worker->number = i + 1;
        if (start(worker)) continue;
        end_workers(threads, i);
        free(threads);
        return NULL;
    }
    return threads;
}

void threads_close(struct threads *threads) {
    if (threads->owner == getpid()) { /* else the workers, and the owner of the lock, are in another process */
        pthread_mutex_lock(&threads->caller);
        end_workers(threads, threads->count - 1);
        pthread_mutex_unlock(&threads->caller);
    }
    free(threads);
}

int threads_count(const struct threads *threads) { return threads->count; }

enum isa threads_isa(const struct threads *threads) { return threads->isa; }

/* Run a region; `optional`: do not wait for workers that have not started when the caller is done. */
static void run(struct threads *threads, region_function *region, void *context, int optional) {
    if (threads->owner != getpid()) { /* a forked child: the lock may be held by a thread that does not exist here */
        region(context, 0, 1);
        return;
    }
    pthread_mutex_lock(&threads->caller);
    threads->region = region, threads->context = context;
    for (int i = 0; i < threads->count - 1; i++) {
        atomic_store(&threads->workers[i].state, CALLED);
        wake(threads, &threads->workers[i].state);
    }
    region(context, 0, threads->count);
    for (int i = 0; i < threads->count - 1; i++) {
        uint32_t called = CALLED;
        if (optional && atomic_compare_exchange_strong(&threads->workers[i].state, &called, IDLE)) continue;
        for (uint32_t state; (state = atomic_load(&threads->workers[i].state)) != IDLE;)
            await_change(threads, &threads->workers[i].state, state, &threads->within);
    }
    pthread_mutex_unlock(&threads->caller);
}

void threads_run(struct threads *threads, region_function *region, void *context) {
    run(threads, region, context, 0);
}

void threads_share(struct threads *threads, region_function *region, void *context) {
    run(threads, region, context, 1);
}

void threads_barrier(struct threads *threads, int count) {
    if (count == 1) return;
    uint32_t round = atomic_load(&threads->passed);
    if (atomic_fetch_add(&threads->arrived, 1) + 1 == (uint32_t)count) {
        atomic_store(&threads->arrived, 0);
        atomic_store(&threads->passed, round + 1);
        wake(threads, &threads->passed);
        return;
    }
    await_change(threads, &threads->passed, round, &threads->within);
}
