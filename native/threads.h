/* A team of threads for short parallel regions: waiting threads spin as long as that pays, then sleep.
 *
 *     threads_open -> threads_run ... threads_run -> threads_close          one caller at a time, others wait
 *
 *     caller   run: call workers --> region(context, 0) --> wait for working workers --> return
 *     worker   spin, sleep       --> region(context, t) --> notify the caller
 *
 * A forked child has no workers: there a region runs as a team of one. There is no cleanup at exit.
 */

#ifndef NATIVE_THREADS_H
#define NATIVE_THREADS_H

#include "isa.h"

enum { MAX_THREADS = 256 };

struct threads;

/* The work of thread `thread` of `count`. */
typedef void region_function(void *context, int thread, int count);

/* Start count - 1 threads. Returns NULL for a count outside 1..MAX_THREADS or if threads cannot be created. */
struct threads *threads_open(int count, enum isa isa);

/* End the threads, after the running region, and free the team. No other call may follow or be waiting. Must not be
 * called within a region. */
void threads_close(struct threads *threads);

/* The most threads of a region: the number of per-thread scratch buffers. */
int threads_count(const struct threads *threads);

/* The instructions this team's functions may use. */
enum isa threads_isa(const struct threads *threads);

/* Run `region` in every thread and return when all are done. It may use threads_barrier. */
void threads_run(struct threads *threads, region_function *region, void *context);

/* Run `region` here, and in those threads that start before this one is done. For work that is claimed piece by piece:
 * it does not wait for a thread that the system delays. The region must not use barriers. */
void threads_share(struct threads *threads, region_function *region, void *context);

/* Within threads_run: wait until every thread of the region is here; their earlier writes are then visible. */
void threads_barrier(struct threads *threads, int count);

#endif
