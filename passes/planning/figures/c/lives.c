/* The lifetimes of buffers: when each is freed, where slots lie in their arenas, and the peaks. */

#include <stdlib.h>
#include <string.h>

#include "figures.h"

/* ------------------------------------------------------------------------------------------------- when buffers are freed */

typedef struct {
    int32_t due, name, user;
} Deferred;

/* Frees behind the call at a place what is due once as many regions have run. Returns how many buffers still wait. */
static int64_t free_due(Work *w, List *freed, Deferred *deferred, int64_t waiting, int32_t ran) {
    int64_t left = 0;
    for (int64_t i = 0; i < waiting; i++)
        if (deferred[i].due <= ran)
            push(w, freed, deferred[i].name, deferred[i].user);
        else
            deferred[left++] = deferred[i];
    return left;
}

/* Returns the buffers that are freed behind each call: after the last use; those that are copied home no sooner than as many
 * regions later as fetches are ahead, or, early ones, before the next region. */
static List *freed_of(Work *w) {
    const int64_t count = w->length, buffers = w->buffer_count;
    int32_t *last = mt_room(w, buffers, sizeof *last), *seen = mt_room(w, buffers, sizeof *seen);
    int32_t *copied = mt_room(w, buffers, sizeof *copied); /* regions that had run when it was copied home */
    enum { NOT_COPIED = -1, EARLY = -2 };
    List *ending = mt_room(w, count, sizeof *ending), *freed = mt_room(w, count, sizeof *freed);
    Deferred *deferred = mt_room(w, buffers, sizeof *deferred);
    int64_t seen_count = 0, waiting = 0;
    int32_t ran = 0;
    for (int64_t i = 0; i < buffers; i++)
        last[i] = copied[i] = NOT_COPIED;
    for (int32_t place = 0; place < count; place++) {
        ending[place] = freed[place] = EMPTY;
        const List lists[] = {w->calls[w->order[place]].reads, w->calls[w->order[place]].writes};
        for (int i = 0; i < 2; i++)
            for EACH(link, lists[i], w) {
                int32_t name = w->links[link].value;
                if (last[name] < 0)
                    seen[seen_count++] = name;
                last[name] = place;
            }
    }
    for (int64_t i = 0; i < seen_count; i++)
        if (!w->buffers[seen[i]].returned)
            push(w, &ending[last[seen[i]]], seen[i], 0);
    const int64_t lookahead = w->choices->lookahead;
    for (int32_t place = 0; place < count; place++) {
        const Call *call = &w->calls[w->order[place]];
        if (call->queue == D2H) {
            for EACH(link, call->reads, w)
                copied[w->links[link].value] = call->early ? EARLY : ran;
        } else if (call->queue == COMPUTE) {
            ran++;
            waiting = free_due(w, &freed[place], deferred, waiting, ran);
        }
        for EACH(link, ending[place], w) {
            int32_t name = w->links[link].value;
            if (copied[name] == EARLY)
                deferred[waiting++] = (Deferred){ran, name, place};
            else if (lookahead && copied[name] >= 0 && copied[name] + lookahead > ran && w->buffers[name].kind == POOLED)
                deferred[waiting++] = (Deferred){(int32_t)(copied[name] + lookahead), name, place};
            else
                push(w, &freed[place], name, place);
        }
        if (waiting && (place + 1 == count || w->calls[w->order[place + 1]].phase != call->phase))
            waiting = free_due(w, &freed[place], deferred, waiting, INT32_MAX);
        else if (waiting && w->calls[w->order[place + 1]].queue == COMPUTE)
            waiting = free_due(w, &freed[place], deferred, waiting, ran);
    }
    return freed;
}

/* ----------------------------------------------------------------------------------------------------------- where slots lie */

typedef struct {
    int64_t low, high;
    int32_t begins, ends;
} Place; /* bytes of an arena, for some time */

typedef struct {
    Place at;
    int64_t nbytes;
    int32_t name, kind, by_disk;
} Slot;

static int larger_first(const void *one, const void *other) {
    const Slot *a = one, *b = other;
    if (a->nbytes != b->nbytes)
        return a->nbytes > b->nbytes ? -1 : 1;
    return (a->at.begins > b->at.begins) - (a->at.begins < b->at.begins);
}

static int lies_behind(const Place *one, const Place *other) {
    if (one->low != other->low)
        return one->low > other->low;
    if (one->high != other->high)
        return one->high > other->high;
    if (one->begins != other->begins)
        return one->begins > other->begins;
    return one->ends > other->ends;
}

/* The places of one arena so far: the last moment at which one begins, and the first one at which one ends. Each lies at 0 or
 * right above another one, so there is no room among them for what lives as long as all of them. */
typedef struct {
    int64_t high;
    int32_t begins, ends;
} Stack;

#define EMPTY_STACK {0, -1, INT32_MAX}

static int lives_with_all(const Stack *stack, const Place *at) {
    return stack->begins < at->ends && at->begins < stack->ends;
}

static void put_on(Stack *stack, const Place *at, int right_above) {
    if (!right_above) /* there may be bytes that nothing has, from now on */
        stack->ends = -1;
    if (at->high > stack->high)
        stack->high = at->high;
    if (at->begins > stack->begins)
        stack->begins = at->begins;
    if (at->ends < stack->ends)
        stack->ends = at->ends;
}

/* Gives each slot bytes of its arena: largest first, at the lowest place that is free while it lives. */
static void place_slots(Work *w, Slot *slots, int64_t count, int64_t *arenas) {
    Place *located[KINDS];
    int64_t counts[KINDS] = {0};
    Stack stacks[KINDS];
    for (int kind = 0; kind < KINDS; kind++) {
        located[kind] = kind == POOLED ? NULL : mt_room(w, count, sizeof(Place));
        stacks[kind] = (Stack)EMPTY_STACK;
    }
    qsort(slots, (size_t)count, sizeof *slots, larger_first);
    for (int64_t i = 0; i < count; i++) {
        Slot *slot = &slots[i];
        Place *others = located[slot->kind], at = slot->at;
        const int64_t known = counts[slot->kind];
        int64_t offset = 0, behind = known;
        Stack *stack = &stacks[slot->kind];
        const int on_top = !slot->by_disk && slot->nbytes && lives_with_all(stack, &at); /* there is no room below */
        if (on_top)
            offset = stack->high;
        for (int64_t j = 0; j < known && !on_top; j++)
            if (others[j].begins < at.ends && at.begins < others[j].ends) {
                if (offset + slot->nbytes <= others[j].low)
                    break;
                if (others[j].high > offset)
                    offset = slot->by_disk ? (others[j].high + SECTOR - 1) / SECTOR * SECTOR : others[j].high;
            }
        at.low = offset;
        at.high = offset + slot->nbytes;
        for (int64_t low = 0; low < behind;) {
            int64_t middle = (low + behind) / 2;
            if (lies_behind(&others[middle], &at))
                behind = middle;
            else
                low = middle + 1;
        }
        memmove(&others[behind + 1], &others[behind], (size_t)(counts[slot->kind]++ - behind) * sizeof *others);
        others[behind] = slot->at = at;
        put_on(stack, &at, !slot->by_disk);
        if (at.high > arenas[slot->kind])
            arenas[slot->kind] = at.high;
    }
}

/* ------------------------------------------------------------------------------------------------- who had the bytes before */

typedef struct {
    int64_t low, high;
    int32_t name;
} Range;

typedef struct {
    Range *ranges; /* in order, none in another */
    int64_t count, room;
} Touched;

/* Gives bytes to a buffer; list gets the buffers that had any of them. */
static void take(Work *w, Touched *touched, int64_t low, int64_t high, int32_t name, List *list) {
    if (low == high)
        return;
    Range *ranges = touched->ranges, new[3];
    int64_t first = 0, last = touched->count, added = 0;
    for (int64_t end = touched->count; first < end;) { /* the first that ends behind low */
        int64_t middle = (first + end) / 2;
        if (ranges[middle].high > low)
            end = middle;
        else
            first = middle + 1;
    }
    for (int64_t begin = first; begin < last;) { /* the first that begins at high or behind it */
        int64_t middle = (begin + last) / 2;
        if (ranges[middle].low >= high)
            last = middle;
        else
            begin = middle + 1;
    }
    for (int64_t i = first; i < last; i++)
        push(w, list, ranges[i].name, 0);
    if (last - first == 1 && ranges[first].low == low && ranges[first].high == high) { /* the same bytes, as most often */
        ranges[first].name = name;
        return;
    }
    if (first < last && ranges[first].low < low)
        new[added++] = (Range){ranges[first].low, low, ranges[first].name};
    new[added++] = (Range){low, high, name};
    if (first < last && high < ranges[last - 1].high)
        new[added++] = (Range){high, ranges[last - 1].high, ranges[last - 1].name};
    while (touched->count + added > touched->room)
        ranges = touched->ranges = mt_grown(w, ranges, &touched->room, touched->count, sizeof *ranges);
    memmove(&ranges[first + added], &ranges[last], (size_t)(touched->count - last) * sizeof *ranges);
    memcpy(&ranges[first], new, (size_t)added * sizeof *ranges);
    touched->count += added - (last - first);
}

Lives mt_lives(Work *w) {
    const int64_t buffers = w->buffer_count;
    Lives lives = {.freed = freed_of(w), .after = mt_room(w, buffers, sizeof(List)), .across = mt_room(w, buffers, sizeof(List))};
    Slot *slots = mt_room(w, buffers, sizeof *slots);
    int32_t *index = mt_room(w, buffers, sizeof *index), *starting = mt_room(w, buffers, sizeof *starting);
    int64_t live = 0, count = 0, in_forward = -1;
    int32_t moment = 0;
    for (int64_t i = 0; i < buffers; i++)
        lives.after[i] = lives.across[i] = EMPTY;
    for (int64_t place = 0; place < w->length; place++) {
        const Call *call = &w->calls[w->order[place]];
        if (call->phase && in_forward < 0) {
            live += w->step->tangents;
            in_forward = count;
        }
        for EACH(link, call->writes, w) {
            const int32_t name = w->links[link].value;
            const Buffer *buffer = &w->buffers[name];
            if (buffer->kind == POOLED) {
                live += buffer->nbytes;
            } else {
                index[name] = (int32_t)count;
                slots[count++] = (Slot){.at = {.begins = moment++}, .nbytes = buffer->nbytes, .name = name,
                                         .kind = buffer->kind, .by_disk = buffer->by_disk};
            }
        }
        if (live + call->workspace > lives.most)
            lives.most = live + call->workspace;
        for EACH(link, lives.freed[place], w) {
            const int32_t name = w->links[link].value;
            if (w->buffers[name].kind == POOLED)
                live -= w->buffers[name].nbytes;
            else
                slots[index[name]].at.ends = moment++;
        }
    }
    if (in_forward < 0)
        in_forward = count;
    for (int64_t i = 0; i < count; i++)
        starting[i] = slots[i].name;
    place_slots(w, slots, count, lives.arenas);
    for (int64_t i = 0; i < count; i++)
        index[slots[i].name] = (int32_t)i;
    Touched touched[KINDS] = {{0}};
    for (int64_t i = 0; i < count; i++) {
        const Slot *slot = &slots[index[starting[i]]];
        take(w, &touched[slot->kind], slot->at.low, slot->at.high, slot->name, &lives.after[slot->name]);
    }
    for (int64_t i = 0; i < in_forward; i++) {
        const Slot *slot = &slots[index[starting[i]]];
        take(w, &touched[slot->kind], slot->at.low, slot->at.high, -1 - slot->name, &lives.across[slot->name]);
    }
    return lives;
}
