#define _GNU_SOURCE
#include "threads.h"

#include <pthread.h>
#include <sched.h>
#include <signal.h>
#include <stdatomic.h>
#include <stdlib.h>
#include <time.h>
#include <unistd.h>

enum { LINE = 64, SPIN_NS = 50000, PAUSES_A_LOOK = 16 };

/* Of one worker, for one region: IDLE -> CALLED (by the caller) -> WORKING (by the worker) -> IDLE (by the worker)
 *                                          CALLED -> IDLE (by a caller who does not need it any more)             */
enum state { IDLE, CALLED, WORKING, CLOSING };

struct worker {
    _Alignas(LINE) _Atomic int state;
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
    _Alignas(LINE) _Atomic int arrived;
    _Alignas(LINE) _Atomic int passed; /* rounds of the barrier */
    _Alignas(LINE) _Atomic int sleepers; /* who wait on `changed`, or are about to */
    pthread_mutex_t lock;
    pthread_cond_t changed;
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

/* Wake whoever sleeps, after a value that they wait for was stored. */
static void wake(struct threads *threads) {
    if (atomic_load(&threads->sleepers) == 0) return;
    pthread_mutex_lock(&threads->lock);
    pthread_cond_broadcast(&threads->changed);
    pthread_mutex_unlock(&threads->lock);
}

/* Wait until *value is not `old`: spin first, then sleep. Return what it is then. */
static int await_change(struct threads *threads, _Atomic int *value, int old) {
    int64_t deadline = now_ns() + SPIN_NS;
    int found;
    do {
        for (int i = 0; i < PAUSES_A_LOOK; i++) {
            if ((found = atomic_load_explicit(value, memory_order_acquire)) != old) return found;
            pause_a_little();
        }
        if (threads->oversubscribed) break;
    } while (now_ns() < deadline);
    atomic_fetch_add(&threads->sleepers, 1);
    pthread_mutex_lock(&threads->lock);
    while ((found = atomic_load(value)) == old) pthread_cond_wait(&threads->changed, &threads->lock);
    pthread_mutex_unlock(&threads->lock);
    atomic_fetch_sub(&threads->sleepers, 1);
    return found;
}

static void *work(void *argument) {
    struct worker *worker = argument;
    struct threads *team = worker->team;
    for (;;) {
        int state = await_change(team, &worker->state, IDLE);
        if (state == CLOSING) return NULL;
        int called = CALLED;
        if (!atomic_compare_exchange_strong(&worker->state, &called, WORKING)) continue; /* not needed any more */
        team->region(team->context, worker->number, team->count);
        atomic_store(&worker->state, IDLE);
        wake(team);
    }
}

/* Start a worker that no signal reaches but its own faults: the others are the main thread's. */
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
    for (int i = 0; i < started; i++) atomic_store(&threads->workers[i].state, CLOSING);
    wake(threads);
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
    pthread_mutex_init(&threads->lock, NULL);
    pthread_cond_init(&threads->changed, NULL);
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
    if (threads->owner == getpid()) { /* else the workers, and whoever held the lock, are another process's */
        pthread_mutex_lock(&threads->caller);
        end_workers(threads, threads->count - 1);
        pthread_mutex_unlock(&threads->caller);
    }
    free(threads);
}

int threads_count(const struct threads *threads) { return threads->count; }

enum isa threads_isa(const struct threads *threads) { return threads->isa; }

/* Run a region; `optional`: do not wait for workers that have not begun when the caller is done. */
static void run(struct threads *threads, region_function *region, void *context, int optional) {
    if (threads->owner != getpid()) { /* a forked child: the lock may be held by a thread that is not there */
        region(context, 0, 1);
        return;
    }
    pthread_mutex_lock(&threads->caller);
    threads->region = region, threads->context = context;
    for (int i = 0; i < threads->count - 1; i++) atomic_store(&threads->workers[i].state, CALLED);
    wake(threads);
    region(context, 0, threads->count);
    for (int i = 0; i < threads->count - 1; i++) {
        int called = CALLED;
        if (optional && atomic_compare_exchange_strong(&threads->workers[i].state, &called, IDLE)) continue;
        for (int state; (state = atomic_load(&threads->workers[i].state)) != IDLE;)
            await_change(threads, &threads->workers[i].state, state);
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
    int round = atomic_load(&threads->passed);
    if (atomic_fetch_add(&threads->arrived, 1) + 1 == count) {
        atomic_store(&threads->arrived, 0);
        atomic_store(&threads->passed, round + 1);
        wake(threads);
        return;
    }
    await_change(threads, &threads->passed, round);
}
