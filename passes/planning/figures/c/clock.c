/* The times of a plan, and its figures together: see ../times.py and ../evaluator.py. */

#include <stdlib.h>
#include <string.h>

#include "figures.h"

static double later(double one, double other) { return other > one ? other : one; }

Clock mt_clock(Work *w, const Lives *lives, const Late *late, int updates) {
    double free_at[QUEUES] = {0.0}, barrier;
    double *ready = mt_room(w, w->buffer_count, sizeof(double)), *touched = mt_room(w, w->buffer_count, sizeof(double));
    double *written = mt_room(w, w->step->operands, sizeof(double)), *read = mt_room(w, w->step->operands, sizeof(double));
    double *slots = mt_room(w, w->buffer_count, sizeof(double));
    uint8_t *on_host = mt_room(w, w->step->operands, 1), *has_slot = mt_room(w, w->buffer_count, 1);
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
        const double finish = begin + (updates || call->update < 0 ? call->us : 0.0);
        free_at[queue] = finish;
        for EACH(link, call->writes, w)
            ready[w->links[link].value] = touched[w->links[link].value] = finish;
        for EACH(link, call->reads, w)
            touched[w->links[link].value] = later(touched[w->links[link].value], finish);
        for EACH(link, call->inputs, w)
            read[w->links[link].value] = later(read[w->links[link].value], finish);
        for EACH(link, call->updated, w) {
            written[w->links[link].value] = finish;
            on_host[w->links[link].value] |= queue == HOST;
        }
        times.end = later(times.end, finish);
        if (queue != HOST)
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

/* Lists updates on the host: see due_first in ../times.py. */
static void list_arriving(Work *w, const Clock *times, Result *result) {
    int64_t *due = mt_room(w, w->step->operands, sizeof *due);
    for (int64_t i = 0; i < w->step->operands; i++)
        due[i] = w->length;
    for (int64_t place = 0; place < w->length; place++) {
        const Call *call = &w->calls[w->order[place]];
        if (!call->phase) {
            for EACH(link, call->inputs, w)
                if (due[w->links[link].value] == w->length)
                    due[w->links[link].value] = place;
        } else if (call->queue == HOST) {
            const int64_t at = result->arriving++;
            result->there[at] = times->arrived[place];
            result->us[at] = call->us;
            result->name[at] = call->update;
            result->due[at] = w->length;
            for EACH(link, call->updated, w)
                if (due[w->links[link].value] < result->due[at])
                    result->due[at] = due[w->links[link].value];
        }
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
        for (int phase = 0; phase <= call->phase; phase++) {
            result->copied[phase] += call->copied;
            result->read[phase] += call->read;
            result->written[phase] += call->written;
        }
    }
    list_arriving(w, &first, result);
}

/* ------------------------------------------------------------------------------------------------------------------ memory */

void *mt_room(Work *w, int64_t count, int64_t size) {
    if (w->owned_count == w->owned_room) {
        void **owned = realloc(w->owned, (size_t)(w->owned_room + 64) * sizeof *owned);
        if (!owned)
            longjmp(w->out_of_memory, 1);
        w->owned = owned;
        w->owned_room += 64;
    }
    void *room = calloc(count > 0 ? (size_t)count : 1, (size_t)size);
    if (!room)
        longjmp(w->out_of_memory, 1);
    return w->owned[w->owned_count++] = room;
}

void *mt_grown(Work *w, void *old, int64_t *room, int64_t count, int64_t size) {
    *room = *room ? *room * 2 : 256;
    void *larger = mt_room(w, *room, size);
    if (count)
        memcpy(larger, old, (size_t)(count * size));
    return larger;
}

void mt_push(Work *w, List *list, int32_t value, int32_t other) {
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

#define EXPORT __attribute__((visibility("default")))

EXPORT int mt_figures_version(void) { return 9; }

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
    while (work.owned_count)
        free(work.owned[--work.owned_count]);
    free(work.owned);
    return status;
}
