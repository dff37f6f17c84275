/* Peaks and times of a plan, to the byte and to the bit those of its schedule: moves.c lists its calls as the rewrites put
 * them, lives.c finds lifetimes as passes/lower.py does, offsets as passes/slots.py does, and peaks as runtime/usage.py
 * does, and clock.c finds times as runtime/sim.py and passes/analysis/state.py do: the same operations on doubles in the
 * same order. */

#ifndef MT_FIGURES_H
#define MT_FIGURES_H

#include <setjmp.h>
#include <stdint.h>

#ifdef __FAST_MATH__
#error "relaxed arithmetic changes bits: build without -ffast-math"
#endif

enum queue { COMPUTE, H2D, D2H, HOST, DISK_READ, DISK_WRITE, NETWORK, QUEUES };
enum kind { POOLED, ON_DEVICE, ON_HOST, ON_DISK, KINDS };
enum { PLACEMENT = 256, SECTOR = 512, BLOCK = 4096 }; /* as in runtime/schedule.py */
enum collective { NO_COLLECTIVE, ALL_REDUCE, REDUCE_SCATTER, BROADCAST, ALL_GATHER, ALL_GATHER_OF_PARTS, COLLECTIVES };
enum waits { NOT_AT_HOME, COMES_AHEAD, COMES_LATE, WAITS_ON_DISK }; /* where an activation waits, and how it comes back */
enum home { AT_DEVICE = 1, AT_DISK = 2, STAYS = 4, LATE = 8, EARLY = 16, STREAMS = 32 }; /* bits of what a plan decides about a home */

/* ------------------------------------------------------------------- from ../compiled.py, which has the same structures */

/* Values that are alike. group: of an activation, the first one of its region with the same readers, returned or not as it
 * is; name: of an activation; cast: the read of which the cast waits at home in its place, or -1; unmade: the region makes
 * it no longer then. group and first_reader (in Step.readers) count from the first of its region. */
typedef struct {
    int64_t nbytes, slot, first_reader, readers, returned, group, name, cast, unmade;
} Value;

/* nbytes, slot: at home; read_slot: on the host, where a disk fills it; there_*: on the device. row_count: -1 where whole
 * values cross; fragment: of a parameter; gathered: the collective, if any, that makes it whole; alone: its
 * state crosses by itself for an update on the device. */
typedef struct {
    int64_t nbytes, slot, read_slot, there_nbytes, there_slot, home, role, on_device, weights, row_count, row_nbytes, fragment,
        gathered, alone;
} Operand;

/* at_home_*: once it is there; crossing, whole: of rows, the bytes that cross and those that they are filled up to; name: the
 * number of the first of the inputs that it is of; count: of gradients, some of them of 8 bytes an element if wide; collective:
 * that combines it over ranks, with what comes of that; narrow_*: at home before the host widens it, 0 if it does not. */
typedef struct {
    int64_t nbytes, slot, at_home_nbytes, at_home_slot, first_reader, readers, home, operand, updates, crossing, whole, name;
    int64_t count, wide, returned, collective, combined_nbytes, combined_slot, narrow_nbytes, narrow_slot;
} Leaving;

/* An operand that a region reads. end, ends_at: of a read by slices, the value that says where their rows end, and the region
 * that makes it; else -1. narrow_*: as it comes in once the host has cast it, 0 if it does not; waits: its cast waits at home
 * for the backward. unread: the region does not need it any more, and if 2, no other one that it is fetched for. */
typedef struct {
    int64_t operand, end, ends_at, narrow_nbytes, narrow_slot, waits, unread;
} Read;

/* A region's reads, values (activations first) and leaving end where those of the next one begin. gone: nothing is left of it
 * once the host casts. */
typedef struct {
    int64_t phase, workspace, gone, first_read, first_reader, first_value, first_other, first_leaving;
} Region;

/* A step as it recomputes what a plan says. There is one more region than there are, which says where all ends. */
typedef struct {
    int64_t regions, operands, homes, first_backward, tangents;
    const Region *region;
    const double *us;
    const Read *reads;
    const int64_t *readers;
    const Operand *operand;
    const Value *value;
    const Leaving *leaving;
} Step;

/* What copies, updates and collectives cost. gbps, scale: by queue; passes: over what an update moves, in sizes of its
 * parameter; through_host, crossings: of what a collective combines, by kind. */
typedef struct {
    double gbps[QUEUES], scale[QUEUES], direct_gbps, direct_scale, host_gbps, row_us;
    double passes, updating_gbps, memory_gbps, on_disk_copies, workspace_copies, norm_copies, network_gbps;
    int64_t streamed; /* sizes of the parameter that cross each way for an update on the device */
    int64_t through_host[COLLECTIVES], crossings[COLLECTIVES], hosts, gathering_ranks, alignment;
} Costs;

/* What a plan decides. home: bits by home; waits: by name of an activation, where it does; of patient updates, by name:
 * rank, and alphabet, the place of the name among all. */
typedef struct {
    int64_t lookahead, disk_lookahead, disk_direct, pooled, updates, patient, sets, run_ahead, held;
    const uint8_t *home, *waits;
    const int64_t *rank, *alphabet;
} Choices;

/* arenas: bytes by kind; period: from one step to the next. By phase, of that one and later ones: bytes that are copied, and
 * that are read from disk and written there. collectives: their us. casts: whether the host casts anything in the backward.
 * order: the names of updates on the host, as many as updates says, as they would best come (see ../../pace.py). */
typedef struct {
    int64_t arenas[KINDS], most, copied[2], read[2], written[2], updates, casts;
    double alone, backward, period, collectives;
    int64_t *order;
} Result;

/* --------------------------------------------------------------------------------------------------- between these files */

typedef struct {
    int32_t first, last; /* of its links; -1: none */
} List;

typedef struct {
    int32_t value, other, next;
} Link;

typedef struct {
    int32_t kind, returned, by_disk; /* by_disk: a disk fills it */
    int64_t nbytes;
} Buffer;

/* reads, writes: buffers; inputs, updated: operands; update: the first of what leaves that it updates, else -1; is_update:
 * it is work of updates; group: gradients that it makes or has at home, else -1; cast: the host's, before it comes in or
 * after it has gone home, else -1; gone: it is not listed; streams: it brings the state of what
 * is at home on the host to the device, or updates it there; or stands for the gradients of that, and is not listed; next: of the calls around one region. */
typedef struct {
    List reads, writes, inputs, updated;
    int32_t queue, phase, early, update, is_update, group, cast, gone, streams, next;
    int64_t workspace, copied, read, written;
    double us;
} Call;

typedef struct {
    List operands, buffers;
    int32_t name;
    int64_t nbytes, count, wide;
} Gradients;

typedef struct Chunk Chunk;

/* Everything about one plan. calls are made in any order; order has them as they run. */
typedef struct {
    const Step *step;
    const Costs *costs;
    const Choices *choices;
    Call *calls;
    Buffer *buffers;
    Gradients *gradients;
    Link *links;
    int32_t *order, *cast_buffers; /* by read whose cast waits at home: the buffer that has it */
    int64_t call_count, call_room, buffer_count, buffer_room, gradient_count, gradient_room, link_count, link_room, length;
    Chunk *chunks; /* all memory, freed at the end; the last one has bytes that are free, as many as are left */
    char *free;
    int64_t owned, left;
    jmp_buf out_of_memory;
} Work;

/* Bytes with one owner after the other: by buffer, those that had its bytes before (after), and for slots of the forward, in
 * the step before (across). freed: behind each call, buffers and the place of their last user. */
typedef struct {
    List *freed, *after, *across;
    int64_t arenas[KINDS], most;
} Lives;

/* What a step leaves to the next one, in µs of that one. */
typedef struct {
    double host, *inputs, *slots;
} Late;

typedef struct {
    double end, drained, backward, *arrived;
    Late late;
} Clock;

void *mt_room(Work *work, int64_t count, int64_t size); /* never returns without memory */
void *mt_zeros(Work *work, int64_t count, int64_t size);
void *mt_grown(Work *work, void *old, int64_t *room, int64_t count, int64_t size);
void mt_moves(Work *work);
Lives mt_lives(Work *work);
Clock mt_clock(Work *work, const Lives *lives, const Late *late, int updates);

static inline void push(Work *w, List *list, int32_t value, int32_t other) {
    if (w->link_count == w->link_room)
        w->links = mt_grown(w, w->links, &w->link_room, w->link_count, sizeof(Link));
    const int32_t link = (int32_t)w->link_count++;
    w->links[link] = (Link){value, other, -1};
    if (list->first < 0)
        list->first = link;
    else
        w->links[list->last].next = link;
    list->last = link;
}

#define EACH(link, list, work) (int32_t link = (list).first; link >= 0; link = (work)->links[link].next)
#define EMPTY ((List){-1, -1})

#endif
