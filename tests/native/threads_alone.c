/* What a team does that no caller from outside can bring about. Built and run by test_threads.py. */
#include "threads.c"

#include <stdio.h>

enum { ROUNDS = 50, BEFORE = 20 };

int isa_is_here(enum isa isa) { return isa == ISA_PLAIN; }

struct met {
    struct threads *team;
    _Atomic int here[ROUNDS]; /* how many came to each barrier */
    _Atomic int early;        /* how many passed one that others had not come to */
};

static void meet(void *context, int thread, int count) {
    (void)thread;
    struct met *met = context;
    for (int round = 0; round < ROUNDS; round++) {
        atomic_fetch_add(&met->here[round], 1);
        threads_barrier(met->team, count);
        if (atomic_load(&met->here[round]) != count) atomic_fetch_add(&met->early, 1);
    }
}

static int barriers_hold_from(uint32_t passed) {
    struct met met = {.team = threads_open(3, ISA_PLAIN)};
    atomic_store(&met.team->passed, passed);
    threads_run(met.team, meet, &met);
    threads_close(met.team);
    return atomic_load(&met.early) == 0;
}

/* For how long waits spin on average, where one of so many is in vain. */
static int64_t spins_for(int one_in) {
    patience patience = SPIN_MOST_NS;
    int64_t sum = 0;
    for (int wait = 1; wait <= 10000; wait++) {
        sum += atomic_load(&patience);
        learn(&patience, atomic_load(&patience), wait % one_in != 0);
    }
    return sum / 10000;
}

int main(void) {
    if (!barriers_hold_from(INT_MAX - BEFORE)) puts("a barrier let somebody through at 2^31");
    if (!barriers_hold_from(UINT_MAX - BEFORE)) puts("a barrier let somebody through at 2^32");
    printf("%lld %lld %lld\n", (long long)spins_for(2), (long long)spins_for(10), (long long)spins_for(100));
    return 0;
}
