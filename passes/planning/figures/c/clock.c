/* The times of a plan, and its figures together. */

#include <stdlib.h>
#include <string.h>

#include "figures.h"

static double later(double one, double other) { return other > one ? other : one; }

/* Runs the calls, each as soon as it may. late: what the step before has left; updates: 0 if these take no time. */
Clock mt_clock(Work *w, const Lives *lives, const Late *late, int updates) {
    double free_at[QUEUES] = {0.0}, barrier;
    double *ready = mt_zeros(w, w->buffer_count, sizeof(double)), *touched = mt_zeros(w, w->buffer_count, sizeof(double));
    double *written = mt_zeros(w, w->step->operands, sizeof(double)), *read = mt_zeros(w, w->step->operands, sizeof(double));
    double *slots = mt_room(w, w->buffer_count, sizeof(double));
    uint8_t *on_host = mt_zeros(w, w->step->operands, 1), *has_slot = mt_zeros(w, w->buffer_count, 1);
    Clock times = {.backward = -1.0, .arrived = mt_room(w, w->length, sizeof(double))};
    int phase = 0;
    if (late)
        free_at[HOST] = late->host;
    for (int64_t place = 0; place < w->length; place++) {
        const Call *call = &w->calls[w->order[place]];
        const int queue = call->queue;
        if (call->phase != phase) {
            phase = 1;
            times.backward = barrier = later(times.end, free_at[HOST]);
            for (int i = 0; i < QUEUES; i++)
                free_at[i] = later(free_at[i], barrier);
        }
        double begin = free_at[queue], there = 0.0;
        for EACH(link, call->writes, w) {
            const int32_t name = w->links[link].value;
            if (w->buffers[name].kind == POOLED) {
                begin = later(begin, free_at[COMPUTE]);
                continue;
            }
            for EACH(other, lives->after[name], w)
                begin = later(begin, touched[w->links[other].value]);
            if (late && !phase)
                for EACH(other, lives->across[name], w)
                    if (w->links[other].value >= 0)
                        begin = later(begin, late->slots[w->links[other].value]);
        }
        for EACH(link, call->reads, w)
            there = later(there, ready[w->links[link].value]);
        for EACH(link, call->inputs, w) {
            there = later(there, written[w->links[link].value]);
            if (late && !phase)
                there = later(there, late->inputs[w->links[link].value]);
        }
        for EACH(link, call->updated, w)
            there = later(there, read[w->links[link].value]);
        times.arrived[place] = there;
        begin = later(begin, there);
        const double finish = begin + (updates || !call->is_update ? call->us : 0.0);
        free_at[queue] = finish;
        for EACH(link, call->writes, w)
            ready[w->links[link].value] = touched[w->links[link].value] = finish;
        for EACH(link, call->reads, w)
            touched[w->links[link].value] = later(touched[w->links[link].value], finish);
        for EACH(link, call->inputs, w)
            read[w->links[link].value] = later(read[w->links[link].value], finish);
        for EACH(link, call->updated, w) {
            written[w->links[link].value] = finish;
            on_host[w->links[link].value] = queue == HOST; /* the next step waits for its last writer, if the host is late */
        }
        times.end = later(times.end, finish);
        if (queue != HOST || !phase)
            times.drained = later(times.drained, finish);
        for EACH(link, lives->freed[place], w) {
            const int32_t name = w->links[link].value;
            if (w->buffers[name].kind == POOLED) {
                free_at[COMPUTE] = later(free_at[COMPUTE], touched[name]);
                continue;
            }
            const int on = w->calls[w->order[w->links[link].other]].queue;
            free_at[on] = later(free_at[on], touched[name]);
            touched[name] = free_at[on];
            if (on == HOST && phase) {
                slots[name] = free_at[on];
                has_slot[name] = 1;
            }
        }
    }
    if (times.backward < 0)
        times.backward = times.end;
    for (int64_t i = 0; i < w->buffer_count; i++)
        slots[i] = has_slot[i] ? slots[i] - times.drained : 0.0;
    for (int64_t i = 0; i < w->step->operands; i++)
        written[i] = on_host[i] ? written[i] - times.drained : 0.0;
    times.late = (Late){later(0.0, free_at[HOST] - times.drained), written, slots};
    return times;
}

/* An update on the host: when its operands are there, the first call of the forward that reads what it updates, and its µs. */
typedef struct {
    double there, us;
    int64_t due, alphabet, name;
} Arriving;

/* Of updates that may begin, the host takes the one due first; then the shorter one; then the first by name. */
static int comes_first(const Arriving *one, const Arriving *other) {
    if (one->due != other->due)
        return one->due < other->due;
    if (one->us != other->us)
        return one->us < other->us;
    return one->alphabet < other->alphabet;
}

static int arrives_first(const void *one, const void *other) {
    const Arriving *a = one, *b = other;
    if (a->there != b->there)
        return a->there < b->there ? -1 : 1;
    return comes_first(b, a) - comes_first(a, b);
}

/* Returns how many updates there are on the host, as they arrive. */
static int64_t list_arriving(Work *w, const Clock *times, Arriving *arriving) {
    int64_t *due = mt_room(w, w->step->operands, sizeof *due), count = 0;
    for (int64_t i = 0; i < w->step->operands; i++)
        due[i] = w->length;
    for (int64_t place = 0; place < w->length; place++) {
        const Call *call = &w->calls[w->order[place]];
        if (!call->phase) {
            for EACH(link, call->inputs, w)
                if (due[w->links[link].value] == w->length)
                    due[w->links[link].value] = place;
        } else if (call->queue == HOST && call->update >= 0) {
            const int64_t name = w->step->leaving[call->update].name;
            Arriving *update = &arriving[count++];
            *update = (Arriving){times->arrived[place], call->us, w->length, w->choices->alphabet[name], name};
            for EACH(link, call->updated, w)
                if (due[w->links[link].value] < update->due)
                    update->due = due[w->links[link].value];
        }
    }
    qsort(arriving, (size_t)count, sizeof *arriving, arrives_first);
    return count;
}

/* Orders updates on the host: of those whose gradients are there, it takes the one that is due first. */
static void order_updates(Work *w, const Clock *times, Result *result) {
    Arriving *arriving = mt_room(w, w->length, sizeof *arriving);
    const int64_t count = list_arriving(w, times, arriving);
    int32_t *waiting = mt_room(w, count, sizeof *waiting); /* those that may begin, the first one last */
    int64_t waits = 0, next = 0;
    double now = 0.0;
    while (next < count || waits) {
        if (!waits)
            now = later(now, arriving[next].there);
        for (; next < count && arriving[next].there <= now; next++) {
            int64_t at = 0;
            for (int64_t end = waits; at < end;) {
                const int64_t middle = (at + end) / 2;
                if (comes_first(&arriving[next], &arriving[waiting[middle]]))
                    at = middle + 1;
                else
                    end = middle;
            }
            memmove(&waiting[at + 1], &waiting[at], (size_t)(waits++ - at) * sizeof *waiting);
            waiting[at] = (int32_t)next;
        }
        const Arriving *update = &arriving[waiting[--waits]];
        now += update->us;
        result->order[result->updates++] = update->name;
    }
}

static void figures(Work *w, Result *result) {
    mt_moves(w);
    const Lives lives = mt_lives(w);
    memcpy(result->arenas, lives.arenas, sizeof lives.arenas);
    result->most = lives.most;
    const Clock first = mt_clock(w, &lives, NULL, 1), without = w->choices->updates ? mt_clock(w, &lives, NULL, 0) : first;
    result->alone = without.end;
    result->backward = without.end - without.backward;
    result->period = w->choices->run_ahead ? mt_clock(w, &lives, &first.late, 1).drained : first.end;
    for (int64_t place = 0; place < w->length; place++) {
        const Call *call = &w->calls[w->order[place]];
        result->casts |= call->queue == HOST && call->phase && !call->is_update;
        result->collectives += call->queue == NETWORK ? call->us : 0.0;
        for (int phase = 0; phase <= call->phase; phase++) {
            result->copied[phase] += call->copied;
            result->read[phase] += call->read;
            result->written[phase] += call->written;
        }
    }
    order_updates(w, &first, result);
}

/* ------------------------------------------------------------------------------------------------------------------ memory */

enum { FIRST_CHUNK = 1 << 20 };

struct Chunk {
    Chunk *before;
};

void *mt_room(Work *w, int64_t count, int64_t size) {
    const int64_t nbytes = ((count > 0 ? count * size : 1) + 15) / 16 * 16;
    if (nbytes > w->left) {
        const int64_t more = nbytes > w->owned ? nbytes + FIRST_CHUNK : w->owned + FIRST_CHUNK; /* few chunks, however large */
        Chunk *chunk = malloc(16 + (size_t)more);
        if (!chunk)
            longjmp(w->out_of_memory, 1);
        chunk->before = w->chunks;
        w->chunks = chunk;
        w->owned += more;
        w->left = more;
        w->free = (char *)chunk + 16;
    }
    void *room = w->free;
    w->free += nbytes;
    w->left -= nbytes;
    return room;
}

void *mt_zeros(Work *w, int64_t count, int64_t size) {
    return memset(mt_room(w, count, size), 0, (size_t)(count * size));
}

void *mt_grown(Work *w, void *old, int64_t *room, int64_t count, int64_t size) {
    *room = *room ? *room * 2 : 2048;
    void *larger = mt_room(w, *room, size);
    if (count)
        memcpy(larger, old, (size_t)(count * size));
    return larger;
}

#define EXPORT __attribute__((visibility("default")))

EXPORT int mt_figures_version(void) { return 13; }

static int failed(Work *w, Result *result) {
    if (setjmp(w->out_of_memory))
        return 1;
    figures(w, result);
    return 0;
}

/* Works out the figures of a plan. Returns 0, or 1 without memory for it. Keeps nothing: several threads may call it. */
EXPORT int mt_figures(const Step *step, const Costs *costs, const Choices *choices, Result *result) {
    Work work = {.step = step, .costs = costs, .choices = choices};
    int status = failed(&work, result);
    for (Chunk *chunk = work.chunks, *before; chunk; chunk = before) {
        before = chunk->before;
        free(chunk);
    }
    return status;
}
