/* A thread that ticks, and counts the time in which the machine kept this process from running.
 *
 *   tick, 100 ms later tick, ...   late: a signal stopped the process, the machine stood still, no core was free
 *   once a second, all threads     ran, and waited for a core: /proc/self/task/TID/schedstat, its first two numbers (ns)
 *
 * The time starved is the larger of the lateness and the waiting share of the time in which threads ran or waited: a
 * tick is short, so it gets a core even when the computing threads do not.
 * Counters are read while the thread writes them: each is one aligned word.
 */

#define _GNU_SOURCE
#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <pthread.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

#define MAX_THREADS 1024
#define TICKS_A_LOOK 10
#define LEAST_RUN_SHARE 20 /* at least a twentieth of any time counts as running, so that every limit is reached */

struct counters { /* as native/ticker.py declares it */
    int64_t num_bytes;
    int64_t run_ns; /* the last tick's time minus `starved_ns`, which is written before it */
    int64_t starved_ns;
    int64_t num_ticks;
};

struct used { /* by one thread, since it began */
    int32_t thread;
    int64_t ran_ns, waited_ns;
};

struct ticker {
    struct counters counters; /* first: its address is the ticker's */
    int64_t interval_ns;
    int stop;
    int num_threads;
    struct used threads[MAX_THREADS], found[MAX_THREADS];
    pthread_t thread;
};

static int64_t now_ns(void) {
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return (int64_t)now.tv_sec * 1000000000 + now.tv_nsec;
}

static void sleep_until(int64_t when_ns) {
    struct timespec when = {.tv_sec = when_ns / 1000000000, .tv_nsec = when_ns % 1000000000};
    while (clock_nanosleep(CLOCK_MONOTONIC, TIMER_ABSTIME, &when, NULL) == EINTR) {
    }
}

/* The times a thread has run and waited; 0 if the kernel does not report them. */
static int read_used(const char *thread, struct used *used) {
    char path[64], text[96];
    snprintf(path, sizeof path, "/proc/self/task/%.20s/schedstat", thread);
    int fd = open(path, O_RDONLY | O_CLOEXEC);
    if (fd < 0) return 0;
    ssize_t size = read(fd, text, sizeof text - 1);
    close(fd);
    if (size <= 0) return 0;
    text[size] = 0;
    long long ran, waited;
    if (sscanf(text, "%lld %lld", &ran, &waited) != 2) return 0;
    *used = (struct used){.thread = (int32_t)atoi(thread), .ran_ns = ran, .waited_ns = waited};
    return 1;
}

/* How much of the `passed_ns` since the last call was lost waiting for a core. */
static int64_t waited_since_look_ns(struct ticker *ticker, int64_t passed_ns) {
    struct used *found = ticker->found;
    DIR *folder = opendir("/proc/self/task");
    if (!folder) return 0;
    int num_found = 0;
    int64_t ran = 0, waited = 0;
    for (struct dirent *entry; (entry = readdir(folder)) && num_found < MAX_THREADS;) {
        struct used one, before = {0}; /* a new thread has used nothing before */
        if (entry->d_name[0] == '.' || !read_used(entry->d_name, &one)) continue;
        for (int i = 0; i < ticker->num_threads; i++)
            if (ticker->threads[i].thread == one.thread) before = ticker->threads[i];
        ran += one.ran_ns - before.ran_ns;
        waited += one.waited_ns - before.waited_ns;
        found[num_found++] = one;
    }
    closedir(folder);
    memcpy(ticker->threads, found, sizeof *found * (size_t)num_found);
    ticker->num_threads = num_found;
    if (waited <= 0 || ran < 0) return 0;
    int64_t active = ran + waited < passed_ns ? ran + waited : passed_ns;
    return (int64_t)((double)active * (double)waited / (double)(ran + waited));
}

/* The time starved: the time lost, up to the share that counts as running. */
static int64_t starved_of(int64_t passed_ns, int64_t lost_ns) {
    int64_t most_ns = passed_ns - passed_ns / LEAST_RUN_SHARE;
    return lost_ns < most_ns ? lost_ns : most_ns;
}

static void report(struct counters *counters, int64_t now, int64_t starved_ns) {
    __atomic_store_n(&counters->starved_ns, starved_ns, __ATOMIC_RELAXED);
    __atomic_store_n(&counters->run_ns, now - starved_ns, __ATOMIC_RELEASE);
}

static void *run(void *argument) {
    struct ticker *ticker = argument;
    struct counters *counters = &ticker->counters;
    int64_t due = counters->run_ns, last = due, looked = due, late = 0;
    waited_since_look_ns(ticker, 0);
    while (!__atomic_load_n(&ticker->stop, __ATOMIC_ACQUIRE)) {
        due += ticker->interval_ns;
        sleep_until(due);
        int64_t now = now_ns(), starved = counters->starved_ns;
        if (now - due > ticker->interval_ns) {
            late += starved_of(now - last, now - due);
            starved += starved_of(now - last, now - due);
            due = now;
        }
        last = now;
        report(counters, now, starved); /* before reading the threads' times, which may take long */
        int64_t passed = now - looked;
        if (passed >= TICKS_A_LOOK * ticker->interval_ns) {
            int64_t waited = starved_of(passed, waited_since_look_ns(ticker, passed));
            if (waited > late) report(counters, now, starved + waited - late);
            looked = now;
            late = 0;
        }
        __atomic_store_n(&counters->num_ticks, counters->num_ticks + 1, __ATOMIC_RELEASE);
    }
    return NULL;
}

/* Start ticking; NULL if no thread can be created. */
struct counters *native_ticker_start(int64_t interval_ns) {
    struct ticker *ticker = calloc(1, sizeof *ticker);
    if (!ticker) return NULL;
    ticker->interval_ns = interval_ns;
    ticker->counters.num_bytes = sizeof ticker->counters;
    ticker->counters.run_ns = now_ns();
    if (pthread_create(&ticker->thread, NULL, run, ticker) != 0) {
        free(ticker);
        return NULL;
    }
    return &ticker->counters;
}

/* End the thread and free the counters. */
void native_ticker_stop(struct counters *counters) {
    struct ticker *ticker = (struct ticker *)counters;
    __atomic_store_n(&ticker->stop, 1, __ATOMIC_RELEASE);
    pthread_join(ticker->thread, NULL);
    free(ticker);
}
