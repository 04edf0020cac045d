/* A team of threads for short parallel regions: where they wait they spin as long as that pays, then sleep.
 *
 *     threads_open -> threads_run ... threads_run -> threads_close          one caller at a time, others wait
 *
 *     caller   run: call workers --> region(context, 0) --> wait for those who work --> return
 *     worker   spin, sleep       --> region(context, t) --> tell the caller
 *
 * A forked child has no workers: there a region runs as a team of one. Nothing is torn down at exit.
 */

#ifndef NATIVE_THREADS_H
#define NATIVE_THREADS_H

#include "isa.h"

enum { MAX_THREADS = 256 };

struct threads;

/* What thread `thread` of `count` does. */
typedef void region_function(void *context, int thread, int count);

/* Start count - 1 threads. Returns NULL for a count outside 1..MAX_THREADS or where the system gives no threads. */
struct threads *threads_open(int count, enum isa isa);

/* End the threads, after a region that runs, and free the team. No call may follow or wait for it; not from within a
 * region. */
void threads_close(struct threads *threads);

/* How many a region has at most: the size of per-thread scratch memory. */
int threads_count(const struct threads *threads);

/* The instructions this team's functions may use. */
enum isa threads_isa(const struct threads *threads);

/* Run `region` in every thread and return when all are done. It may use threads_barrier. */
void threads_run(struct threads *threads, region_function *region, void *context);

/* Run `region` here, and in those threads that begin before this one has ended. For work that is claimed piece by
 * piece: a thread that the system holds up is not waited for. Without barriers. */
void threads_share(struct threads *threads, region_function *region, void *context);

/* Within threads_run: wait until every thread of the region is here; what they wrote before is seen after. */
void threads_barrier(struct threads *threads, int count);

#endif
