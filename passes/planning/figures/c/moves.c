/* The calls of a plan in order, as the rewrites would put them: regions, fetches, copies home and updates. */

#include "figures.h"

static int32_t new_buffer(Work *w, int kind, int64_t nbytes, int64_t slot, int returned) {
    if (w->buffer_count == w->buffer_room)
        w->buffers = mt_grown(w, w->buffers, &w->buffer_room, w->buffer_count, sizeof(Buffer));
    w->buffers[w->buffer_count] = (Buffer){kind, returned, 0, kind ? slot : nbytes};
    return (int32_t)w->buffer_count++;
}

static int32_t new_call(Work *w, int queue, double us, int phase) {
    if (w->call_count == w->call_room)
        w->calls = mt_grown(w, w->calls, &w->call_room, w->call_count, sizeof(Call));
    w->calls[w->call_count] = (Call){.reads = EMPTY, .writes = EMPTY, .inputs = EMPTY, .updated = EMPTY, .queue = queue,
                                     .phase = phase, .update = -1, .group = -1, .cast = -1, .next = -1,
                                     .us = us};
    return (int32_t)w->call_count++;
}

static int32_t new_gradients(Work *w) {
    if (w->gradient_count == w->gradient_room)
        w->gradients = mt_grown(w, w->gradients, &w->gradient_room, w->gradient_count, sizeof(Gradients));
    w->gradients[w->gradient_count] = (Gradients){EMPTY, EMPTY, -1, 0, 0, 0};
    return (int32_t)w->gradient_count++;
}

/* ------------------------------------------------------------------------------------------------------------- what it costs */

/* Links belong to one list: what is added to it would be added to all that begin with the same ones. */
static List copied(Work *w, List list) {
    List copy = EMPTY;
    for EACH(link, list, w)
        push(w, &copy, w->links[link].value, w->links[link].other);
    return copy;
}

static double copy_us(const Costs *costs, int64_t nbytes, int queue) {
    return costs->scale[queue] * ((double)nbytes / costs->gbps[queue] / 1e3);
}

static double direct_us(const Costs *costs, int64_t nbytes) { /* from disk to the device */
    return costs->direct_scale * ((double)nbytes / costs->direct_gbps / 1e3);
}

static double drive_us(const Costs *costs, int64_t nbytes) { /* read and written */
    return copy_us(costs, nbytes, DISK_READ) + copy_us(costs, nbytes, DISK_WRITE);
}

/* The µs of rows, of crossing bytes, that are filled up to whole ones. */
static double rows_us(const Costs *costs, int64_t count, int64_t crossing, int64_t whole, int queue) {
    double zeros = queue == D2H ? (double)whole / costs->host_gbps / 1e3 : 0.0;
    return copy_us(costs, crossing, queue) + (double)count * costs->row_us + zeros;
}

static double collective_us(const Costs *costs, int64_t nbytes, int kind) {
    const int64_t ranks = kind == ALL_GATHER || kind == ALL_GATHER_OF_PARTS ? costs->gathering_ranks : 1;
    const double whole = kind == ALL_GATHER_OF_PARTS ? (double)(2 * nbytes) : 0.0;
    double through_host = ((double)(costs->through_host[kind] * nbytes) / (double)ranks + whole) / costs->host_gbps;
    double crossings = (double)(costs->crossings[kind] * (costs->hosts - 1)) / (double)costs->hosts;
    return (through_host + crossings * (double)nbytes / costs->network_gbps) / 1e3;
}

/* The host reads and writes what it casts. */
static double cast_us(const Costs *costs, int64_t nbytes) { return (double)nbytes / costs->host_gbps / 1e3; }

static int64_t rounded(int64_t nbytes, int64_t unit) { return (nbytes + unit - 1) / unit * unit; }

/* ---------------------------------------------------------------------------------------------- calls around a region */

typedef struct {
    int32_t *before, *before_last, *behind; /* by region: chains of calls */
} Around;

static void append_before(Work *w, Around *around, int64_t position, int32_t call) {
    if (around->before[position] < 0)
        around->before[position] = call;
    else
        w->calls[around->before_last[position]].next = call;
    around->before_last[position] = call;
}

/* Puts a call before the fetches that end the list. */
static void insert_before(Work *w, Around *around, int64_t position, int32_t call) {
    int32_t last = -1;
    for (int32_t other = around->before[position]; other >= 0; other = w->calls[other].next)
        if (w->calls[other].queue == NETWORK)
            last = other;
    int32_t *next = last < 0 ? &around->before[position] : &w->calls[last].next;
    if (*next < 0)
        around->before_last[position] = call;
    w->calls[call].next = *next;
    *next = call;
}

static void insert_behind(Work *w, Around *around, int64_t position, int32_t call) {
    w->calls[call].next = around->behind[position];
    around->behind[position] = call;
}

typedef struct {
    List *readers; /* by value: the fetches of slices that it tells which cross */
} Ends;

/* The region before which a fetch is issued. */
static int64_t first_of(const Work *w, int64_t position, int64_t ahead) {
    int64_t least = w->step->region[position].phase ? w->step->first_backward : 0;
    return position - ahead > least ? position - ahead : least;
}

static int is_away(const Work *w, const Operand *operand) {
    return operand->weights ? !(w->choices->home[operand->home] & AT_DEVICE) : !operand->on_device;
}

/* ------------------------------------------------------------------------------------------------------------------- fetches */

enum as { AT_HOME, CAST, THERE }; /* of what is fetched: as a disk has it, as the host casts it, and as it comes in */

static int is_there(const Read *read, int as) {
    return as == CAST ? read->narrow_nbytes && !read->waits : as == AT_HOME || read->unread < 2;
}

/* Adds a buffer for the operands of each role to list. */
static void by_role(Work *w, int kind, List operands, int as, List *list) {
    const Operand *operand = w->step->operand;
    for EACH(link, operands, w) {
        int64_t role = operand[w->links[link].value].role, nbytes = 0, slot = 0;
        int seen = !is_there(&w->step->reads[w->links[link].other], as);
        for (int32_t other = operands.first; other != link && !seen; other = w->links[other].next)
            seen = operand[w->links[other].value].role == role && is_there(&w->step->reads[w->links[other].other], as);
        if (seen)
            continue;
        for (int32_t other = link; other >= 0; other = w->links[other].next) {
            const Operand *alike = &operand[w->links[other].value];
            const Read *read = &w->step->reads[w->links[other].other];
            if (alike->role != role || !is_there(read, as))
                continue;
            const int narrow = read->narrow_nbytes && as != AT_HOME;
            nbytes += narrow ? read->narrow_nbytes : as == AT_HOME ? alike->nbytes : alike->there_nbytes;
            slot += narrow ? read->narrow_slot : as == AT_HOME ? alike->read_slot : alike->there_slot;
        }
        const int32_t buffer = new_buffer(w, kind, nbytes, slot, 0);
        w->buffers[buffer].by_disk = as == AT_HOME;
        push(w, list, buffer, 0);
    }
}

/* Lets the host cast what crosses narrow before it is fetched. */
static void cast_first(Work *w, int32_t fetch, List operands) {
    const Step *step = w->step;
    int64_t nbytes = 0;
    List writes = EMPTY, inputs = EMPTY;
    for EACH(link, operands, w) {
        const int32_t number = w->links[link].value, at = w->links[link].other;
        if (!step->reads[at].narrow_nbytes) {
            push(w, &w->calls[fetch].inputs, number, 0);
            continue;
        }
        push(w, &inputs, number, 0);
        nbytes += step->operand[number].nbytes + step->reads[at].narrow_nbytes;
        if (step->reads[at].waits) {
            w->cast_buffers[at] = new_buffer(w, ON_HOST, step->reads[at].narrow_nbytes, step->reads[at].narrow_slot, 0);
            push(w, &writes, w->cast_buffers[at], 0);
            if (step->reads[at].unread < 2)
                push(w, &w->calls[fetch].reads, w->cast_buffers[at], 0);
        }
    }
    if (!nbytes)
        return;
    List plain = EMPTY;
    by_role(w, ON_HOST, operands, CAST, &plain);
    for EACH(link, plain, w) {
        push(w, &writes, w->links[link].value, 0);
        push(w, &w->calls[fetch].reads, w->links[link].value, 0);
    }
    const int32_t cast = new_call(w, HOST, cast_us(w->costs, nbytes), w->calls[fetch].phase);
    w->calls[cast].inputs = inputs;
    w->calls[cast].writes = writes;
    w->calls[fetch].cast = cast;
}

/* A read from disk for a region, which fetches as many regions ahead. Returns the buffers on the host that it fills. */
static List read_from_disk(Work *w, Around *around, int64_t position, List operands, int64_t nbytes, int64_t ahead) {
    double us = copy_us(w->costs, nbytes, DISK_READ);
    int32_t read = new_call(w, DISK_READ, us, (int)w->step->region[position].phase);
    List writes = EMPTY;
    w->calls[read].inputs = operands;
    w->calls[read].read = nbytes;
    by_role(w, ON_HOST, operands, AT_HOME, &writes);
    w->calls[read].writes = writes;
    append_before(w, around, first_of(w, position, ahead + w->choices->disk_lookahead), read);
    return writes;
}

/* Makes parameters whole of which each host has a part, for a region: one region before the copy, so that one is gathered while
 * another crosses. Returns the buffers that have them. */
static List gathered(Work *w, Around *around, int64_t position, List operands, int64_t nbytes, int64_t ahead) {
    const Operand *operand = w->step->operand;
    const double us = collective_us(w->costs, nbytes, ALL_GATHER_OF_PARTS);
    int32_t gather = new_call(w, NETWORK, us, (int)w->step->region[position].phase);
    List writes = EMPTY;
    int64_t slot = 0;
    for EACH(link, operands, w)
        slot += operand[w->links[link].value].slot;
    push(w, &writes, new_buffer(w, ON_HOST, nbytes, slot, 0), 0);
    w->calls[gather].inputs = operands;
    w->calls[gather].writes = writes;
    append_before(w, around, first_of(w, position, ahead + 1), gather);
    return writes;
}

/* A copy for a region of operands of one home. before: how many fragments of the home the region reads that precede these;
 * end: a read of them, which says which slices cross. */
static void fetch_group(Work *w, Around *around, int64_t position, List operands, int64_t before, const Read *end,
                        int32_t *staying, Ends *ends) {
    const Step *step = w->step;
    const Operand *first = &step->operand[w->links[operands.first].value];
    const uint8_t home = w->choices->home[first->home];
    const int phase = (int)step->region[position].phase, 
              stays = !phase && end->end < 0 && (home & STAYS) && !(home & AT_DEVICE);
    const int kind = w->choices->pooled || stays ? POOLED : ON_DEVICE;
    const int64_t ahead = before + (phase && (home & LATE) ? 0 : w->choices->lookahead);
    const int in_rows = first->row_count >= 0;
    int64_t nbytes = 0, brought = 0;
    for EACH(link, operands, w) {
        const Read *read = &step->reads[w->links[link].other];
        if (read->unread < 2) {
            nbytes += read->narrow_nbytes ? read->narrow_nbytes : step->operand[w->links[link].value].nbytes;
            brought++;
        }
    }
    double us = in_rows ? rows_us(w->costs, first->row_count, first->row_nbytes, nbytes, H2D) : copy_us(w->costs, nbytes, H2D);
    int32_t fetch = new_call(w, H2D, us, phase);
    w->calls[fetch].copied = in_rows ? first->row_nbytes : nbytes;
    if (home & AT_DISK && w->choices->disk_direct && !in_rows && end->end < 0) {
        w->calls[fetch].us = direct_us(w->costs, nbytes);
        w->calls[fetch].inputs = operands;
        w->calls[fetch].read = nbytes;
    } else if (home & AT_DISK) {
        List reads = read_from_disk(w, around, position, operands, nbytes, ahead);
        w->calls[fetch].reads = copied(w, reads);
    } else if (first->gathered == ALL_GATHER_OF_PARTS) {
        List reads = gathered(w, around, position, operands, nbytes, before + w->choices->lookahead);
        w->calls[fetch].reads = copied(w, reads);
    } else {
        cast_first(w, fetch, operands);
    }
    w->calls[fetch].gone = !brought;
    List writes = EMPTY;
    if (stays) {
        for EACH(link, operands, w) {
            const int32_t number = w->links[link].value;
            const Read *read = &step->reads[w->links[link].other];
            const Operand *operand = &step->operand[number];
            if (read->unread == 2)
                continue;
            staying[number] = new_buffer(w, kind, read->narrow_nbytes ? read->narrow_nbytes : operand->there_nbytes,
                                         read->narrow_nbytes ? read->narrow_slot : operand->there_slot, 0);
            push(w, &writes, staying[number], 0);
            if (!read->unread)
                push(w, &w->calls[position].reads, staying[number], 0);
        }
    } else {
        by_role(w, kind, operands, THERE, &writes);
        for EACH(link, writes, w)
            push(w, &w->calls[position].reads, w->links[link].value, 0);
    }
    w->calls[fetch].writes = writes;
    if (end->end >= 0) { /* which slices have rows is known once the region has run that computes it */
        push(w, &ends->readers[end->end], fetch, 0);
        const int64_t between = position - end->ends_at - 1;
        append_before(w, around, first_of(w, position, ahead < between ? ahead : between), fetch);
    } else {
        append_before(w, around, first_of(w, position, ahead), fetch);
    }
}

/* Lists what comes in for each region, a copy per home. */
static void fetch_all(Work *w, Around *around, Ends *ends) {
    const Step *step = w->step;
    int32_t *staying = mt_room(w, step->operands, sizeof *staying); /* operand -> buffer */
    List *groups = mt_room(w, step->operands, sizeof *groups);
    int64_t *before = mt_room(w, step->operands, sizeof *before); /* by group: fragments of its home in groups before */
    const Read **ends_of = mt_room(w, step->operands, sizeof *ends_of); /* by group: a read of it */
    for (int64_t i = 0; i < step->operands; i++)
        staying[i] = -1;
    for (int64_t position = 0; position < step->regions; position++) {
        const Region *region = &step->region[position];
        int64_t count = 0;
        for (int64_t at = region->first_read; at < region[1].first_read; at++) {
            const int32_t number = (int32_t)step->reads[at].operand;
            const Operand *operand = &step->operand[number];
            if (region->phase && staying[number] >= 0) {
                if (!step->reads[at].unread)
                    push(w, &w->calls[position].reads, staying[number], 0);
            } else if (!is_away(w, operand)) {
                push(w, &w->calls[position].inputs, number, 0);
            } else { /* a copy per home; what crosses by rows is apart, and fragments behind the first */
                int64_t group = count, fragments = 0;
                for (int64_t i = 0; i < count && operand->fragment; i++)
                    for EACH(link, groups[i], w) {
                        const Operand *other = &step->operand[w->links[link].value];
                        fragments += other->fragment && other->home == operand->home;
                    }
                for (int64_t i = 0; i < count && group == count && operand->row_count < 0; i++) {
                    const Operand *first = &step->operand[w->links[groups[i].first].value];
                    if (first->home == operand->home && first->row_count < 0 && before[i] == fragments &&
                        ends_of[i]->end == step->reads[at].end)
                        group = i;
                }
                if (group == count) {
                    before[count] = fragments;
                    ends_of[count] = &step->reads[at];
                    groups[count++] = EMPTY;
                }
                push(w, &groups[group], number, (int32_t)at);
            }
        }
        for (int64_t i = 0; i < count; i++)
            fetch_group(w, around, position, groups[i], before[i], ends_of[i], staying, ends);
    }
}

/* -------------------------------------------------------------------------------------------------- what regions make */

/* A result of a region, which later ones read where it is. */
static int32_t stays(Work *w, int64_t position, int64_t first_reader, int64_t readers, int64_t nbytes, int64_t slot,
                     int64_t returned) {
    int32_t buffer = new_buffer(w, POOLED, nbytes, slot, (int)returned);
    const int64_t *reader = w->step->readers + w->step->region[position].first_reader + first_reader;
    push(w, &w->calls[position].writes, buffer, 0);
    for (int64_t i = 0; i < readers; i++)
        push(w, &w->calls[reader[i]].reads, buffer, 0);
    return buffer;
}

/* Lets the fetches read a value's buffer that need it to know which slices cross. */
static void read_by(Work *w, const Ends *ends, int64_t value, int32_t buffer) {
    for EACH(link, ends->readers[value], w)
        push(w, &w->calls[w->links[link].value].reads, buffer, 0);
}

static int32_t copy_of(Work *w, int queue, int32_t from, int32_t to, int64_t nbytes, int phase) {
    int32_t copy = new_call(w, queue, copy_us(w->costs, nbytes, queue), phase);
    push(w, &w->calls[copy].reads, from, 0);
    push(w, &w->calls[copy].writes, to, 0);
    Call *call = &w->calls[copy];
    *(queue == DISK_READ ? &call->read : queue == DISK_WRITE ? &call->written : &call->copied) = nbytes;
    return copy;
}

/* A value that goes home behind its region, or is there as a cast, and comes back before later ones. What waits on disk passes
 * through the host. */
static int32_t waits_at_home(Work *w, Around *around, int64_t position, const Value *value) {
    const Region *region = w->step->region;
    const int64_t *reader = w->step->readers + region[position].first_reader + value->first_reader;
    const uint8_t waits = w->choices->waits[value->name];
    const int64_t on_disk = waits == WAITS_ON_DISK, delay = on_disk ? w->choices->disk_lookahead : 0;
    const int64_t host_slot = on_disk ? rounded(value->nbytes, SECTOR) : value->slot;
    const int64_t cast_at = value->cast;
    const int64_t nbytes = cast_at < 0 ? value->nbytes : w->step->reads[cast_at].narrow_nbytes;
    const int64_t slot = cast_at < 0 ? value->slot : w->step->reads[cast_at].narrow_slot;
    int32_t result = new_buffer(w, POOLED, value->unmade ? 0 : value->nbytes, value->slot, (int)value->returned);
    int32_t current = result, at_home = cast_at < 0 ? -1 : w->cast_buffers[cast_at];
    int64_t previous = position;
    push(w, &w->calls[position].writes, result, 0);
    for (int64_t i = 0; i < value->readers; i++) {
        int64_t use = reader[i];
        int same_phase = region[previous].phase == region[use].phase;
        if (!(use - previous <= 1 && (same_phase || current == result))) {
            const int phase = (int)region[use].phase, late = waits == COMES_LATE && phase;
            const int64_t between = use - previous - 1, lookahead = w->choices->lookahead;
            const int64_t ahead = late ? 0 : lookahead < between ? lookahead : between;
            const int64_t read_at = first_of(w, use, ahead + delay < between ? ahead + delay : between);
            if (at_home < 0) {
                at_home = new_buffer(w, ON_HOST, value->nbytes, host_slot, 0);
                w->buffers[at_home].by_disk = (int32_t)on_disk;
                int32_t home = copy_of(w, D2H, result, at_home, value->nbytes, (int)region[position].phase);
                if (on_disk) { /* written behind a later region, so that the disk keeps no copy home waiting */
                    int64_t until = position;
                    while (until < position + delay && until < read_at - 1 && region[until + 1].phase == region[position].phase)
                        until++;
                    int32_t spilled = new_buffer(w, ON_DISK, value->nbytes, rounded(value->nbytes, BLOCK), 0);
                    int32_t write = copy_of(w, DISK_WRITE, at_home, spilled, value->nbytes, (int)region[position].phase);
                    insert_behind(w, around, until, write);
                    at_home = spilled;
                }
                insert_behind(w, around, position, home);
            }
            int32_t arriving = at_home;
            if (on_disk) {
                arriving = new_buffer(w, ON_HOST, value->nbytes, host_slot, 0);
                w->buffers[arriving].by_disk = 1;
                append_before(w, around, read_at, copy_of(w, DISK_READ, at_home, arriving, value->nbytes, phase));
            }
            current = new_buffer(w, w->choices->pooled ? POOLED : ON_DEVICE, nbytes, slot, 0);
            int32_t back = copy_of(w, H2D, arriving, current, nbytes, phase);
            if (late)
                insert_before(w, around, use, back);
            else
                append_before(w, around, first_of(w, use, ahead), back);
        }
        push(w, &w->calls[use].reads, current, 0);
        previous = use;
    }
    return result;
}

/* Adds the entry's gradients to those that one call makes or has at home. Returns these, which begin with it if none were. */
static int32_t updated_with(Work *w, int32_t gradients, int32_t i, int64_t nbytes) {
    const Leaving *entry = &w->step->leaving[i];
    if (gradients < 0) {
        gradients = new_gradients(w);
        w->gradients[gradients].name = i;
    }
    push(w, &w->gradients[gradients].operands, (int32_t)entry->operand, 0);
    w->gradients[gradients].nbytes += nbytes;
    w->gradients[gradients].count += entry->count;
    w->gradients[gradients].wide |= entry->wide;
    return gradients;
}

/* The device updates it, though its home is the host. */
static int is_streamed(const Work *w, const Leaving *entry) {
    const Operand *operand = &w->step->operand[entry->operand];
    const int streams = (w->choices->home[operand->home] & (STREAMS | AT_DEVICE | AT_DISK)) == STREAMS;
    return streams && operand->weights && entry->updates && w->choices->updates && w->costs->streamed;
}

static int leaves(const Work *w, const Leaving *entry) {
    return is_away(w, &w->step->operand[entry->operand]) && !is_streamed(w, entry);
}

static int goes_along(const Work *w, const Leaving *entry, const Leaving *first) {
    const Operand *operand = &w->step->operand[entry->operand], *of = &w->step->operand[first->operand];
    return leaves(w, entry) && entry->home == first->home && (of->row_count >= 0 ? operand == of : operand->row_count < 0);
}

/* What a copy home of entries brings there, of those with one collective: it combines them, and what is updated stays.
 * widened: the cast that follows it, if any. */
static void arrive(Work *w, int32_t copy, int32_t widened, int64_t first, int64_t end, int collective) {
    const Leaving *leaving = w->step->leaving;
    struct { int64_t nbytes, slot, kept_nbytes, kept_slot; } there[2] = {{0}}; /* as it comes, and widened */
    const int32_t makers[2] = {copy, widened};
    int64_t combined_nbytes = 0, combined_slot = 0;
    int32_t gradients = -1;
    for (int64_t i = first; i < end; i++) {
        const Leaving *entry = &leaving[i];
        const int wide = entry->narrow_nbytes != 0;
        if (!goes_along(w, entry, &leaving[first]) || entry->collective != collective)
            continue;
        there[wide].nbytes += entry->at_home_nbytes, there[wide].slot += entry->at_home_slot;
        if (entry->updates && w->choices->updates) {
            gradients = updated_with(w, gradients, (int32_t)i, collective ? entry->combined_nbytes : entry->at_home_nbytes);
            there[wide].kept_nbytes += entry->at_home_nbytes, there[wide].kept_slot += entry->at_home_slot;
            combined_nbytes += entry->combined_nbytes, combined_slot += entry->combined_slot;
        }
    }
    int32_t source = copy;
    if (collective) {
        const double us = collective_us(w->costs, there[0].nbytes + there[1].nbytes, collective);
        source = new_call(w, NETWORK, us, w->calls[copy].phase);
    }
    for (int wide = 0; wide < 2; wide++) {
        const int64_t nbytes = collective ? there[wide].nbytes : there[wide].kept_nbytes;
        if (!nbytes)
            continue;
        const int32_t buffer = new_buffer(w, ON_HOST, nbytes, collective ? there[wide].slot : there[wide].kept_slot, 0);
        push(w, &w->calls[makers[wide]].writes, buffer, 0);
        push(w, collective ? &w->calls[source].reads : &w->gradients[gradients].buffers, buffer, 0);
    }
    if (gradients >= 0 && collective) {
        const int32_t kept = new_buffer(w, ON_HOST, combined_nbytes, combined_slot, 0);
        push(w, &w->calls[source].writes, kept, 0);
        push(w, &w->gradients[gradients].buffers, kept, 0);
    }
    w->calls[source].group = gradients >= 0 ? gradients : w->calls[source].group;
}

/* Lets the host widen what has come home narrow. Returns the cast; -1 if nothing has. */
static int32_t widen(Work *w, int32_t copy, int64_t first, int64_t end) {
    int64_t narrow = 0, slot = 0, wide = 0;
    for (int64_t i = first; i < end; i++) {
        const Leaving *entry = &w->step->leaving[i];
        if (entry->narrow_nbytes && goes_along(w, entry, &w->step->leaving[first]))
            narrow += entry->narrow_nbytes, slot += entry->narrow_slot, wide += entry->at_home_nbytes;
    }
    if (!narrow)
        return -1;
    const int32_t cast = new_call(w, HOST, cast_us(w->costs, narrow + wide), w->calls[copy].phase);
    const int32_t buffer = new_buffer(w, ON_HOST, narrow, slot, 0);
    push(w, &w->calls[copy].writes, buffer, 0);
    push(w, &w->calls[cast].reads, buffer, 0);
    return w->calls[copy].cast = cast;
}

/* Gradients and new buffers: a copy home per home, and what combines it over ranks, or an update on the device. */
static void leave(Work *w, Around *around, int64_t position) {
    const Step *step = w->step;
    const int64_t first = step->region[position].first_leaving, end = step->region[position + 1].first_leaving;
    const int64_t before = w->call_count;
    int32_t here = -1, streamed = -1; /* gradients of what is at home on the device, and of what is streamed together */
    for (int64_t i = first; i < end; i++) {
        const Leaving *entry = &step->leaving[i];
        if (!leaves(w, entry)) {
            const int streams = is_streamed(w, entry);
            const int updated = entry->updates && w->choices->updates, returned = entry->returned || !updated;
            int32_t buffer = stays(w, position, entry->first_reader, entry->readers, entry->nbytes, entry->slot, returned);
            if (updated) {
                const int alone = streams && step->operand[entry->operand].alone;
                const int32_t known = alone ? -1 : streams ? streamed : here;
                const int32_t group = updated_with(w, known, (int32_t)i, entry->nbytes);
                push(w, &w->gradients[group].buffers, buffer, 0);
                if (streams && known < 0) {
                    const int32_t mark = new_call(w, COMPUTE, 0.0, (int)step->region[position].phase);
                    w->calls[mark].group = group;
                    w->calls[mark].streams = 1;
                }
                if (!streams)
                    here = group;
                else if (!alone)
                    streamed = group;
            }
        }
    }
    w->calls[position].group = here;
    for (int64_t i = first; i < end; i++) { /* a copy for each home, when its first entry is seen */
        const Leaving *entry = &step->leaving[i];
        const Operand *of = &step->operand[entry->operand];
        int seen = !leaves(w, entry), kinds[COLLECTIVES], count = 0;
        for (int64_t j = first; j < i && !seen; j++)
            seen = goes_along(w, &step->leaving[j], entry);
        if (seen)
            continue;
        int32_t copy = new_call(w, D2H, 0.0, (int)step->region[position].phase);
        int64_t nbytes = 0;
        for (int64_t j = i; j < end; j++) {
            const Leaving *alike = &step->leaving[j];
            if (!goes_along(w, alike, entry))
                continue;
            nbytes += alike->nbytes;
            push(w, &w->calls[copy].reads,
                 stays(w, position, alike->first_reader, alike->readers, alike->nbytes, alike->slot, (int)alike->returned), 0);
            int known = 0;
            for (int k = 0; k < count; k++)
                known |= kinds[k] == alike->collective;
            if (!known)
                kinds[count++] = (int)alike->collective;
        }
        const int in_rows = of->row_count >= 0;
        w->calls[copy].us = in_rows ? rows_us(w->costs, of->row_count, entry->crossing, entry->whole, D2H)
                                    : copy_us(w->costs, nbytes, D2H);
        w->calls[copy].copied = in_rows ? entry->crossing : nbytes;
        w->calls[copy].early = (w->choices->home[entry->home] & EARLY) != 0;
        const int32_t widened = widen(w, copy, i, end);
        while (count) /* the last one is inserted first behind the copy */
            arrive(w, copy, widened, i, end, kinds[--count]);
    }
    for (int32_t call = (int32_t)w->call_count - 1; call >= before; call--) /* the first one comes first */
        if (w->calls[call].queue != HOST) /* casts are listed last of all */
            insert_behind(w, around, position, call);
}

static int32_t remains(Work *w, int64_t position, const Value *value, int64_t nbytes, int64_t slot) {
    return stays(w, position, value->first_reader, value->readers, nbytes, slot, value->returned);
}

static void make(Work *w, Around *around, const Ends *ends, int64_t position) {
    const Region *region = &w->step->region[position];
    const Value *value = w->step->value;
    for (int64_t i = region->first_value; i < region->first_other; i++)
        if (w->choices->waits[value[i].name])
            read_by(w, ends, i, waits_at_home(w, around, position, &value[i]));
    const int64_t first = region->first_value;
    typedef struct { int64_t nbytes, slot, listed; } Size;
    Size *together = mt_zeros(w, region->first_other - first, sizeof *together); /* by group: what stays alike is one buffer */
    for (int64_t i = first; i < region->first_other; i++)
        if (!w->choices->waits[value[i].name])
            together[value[i].group].nbytes += value[i].nbytes, together[value[i].group].slot += value[i].slot;
    for (int64_t i = first; i < region->first_other; i++) {
        Size *size = &together[value[i].group];
        if (!w->choices->waits[value[i].name] && !size->listed++)
            read_by(w, ends, i, remains(w, position, &value[i], size->nbytes, size->slot));
    }
    for (int64_t i = region->first_other; i < region[1].first_value; i++)
        read_by(w, ends, i, remains(w, position, &value[i], value[i].nbytes, value[i].slot));
    leave(w, around, position);
}

/* ------------------------------------------------------------------------------------------------------------------- updates */

/* The fetch of all that an update on the device of what is at home on the host reads and writes, into the buffer state. */
static int32_t fetch_state(Work *w, int32_t source, int32_t *state) {
    const Gradients group = w->gradients[w->calls[source].group];
    int64_t nbytes = 0;
    for EACH(link, group.operands, w)
        nbytes += w->costs->streamed * w->step->operand[w->links[link].value].nbytes;
    *state = new_buffer(w, ON_DEVICE, nbytes, rounded(nbytes, PLACEMENT), 0);
    const int32_t fetch = new_call(w, H2D, copy_us(w->costs, nbytes, H2D), 1);
    w->calls[fetch].inputs = copied(w, group.operands);
    push(w, &w->calls[fetch].writes, *state, 0);
    w->calls[fetch].copied = nbytes;
    w->calls[fetch].is_update = w->calls[fetch].streams = 1;
    return fetch;
}

/* An update of the gradients that a call makes or has at home. scale: the buffer of their factor, state: of what came to the
 * device for it and goes home again; -1: none. */
static int32_t update(Work *w, int32_t source, int32_t scale, int32_t state) {
    const Gradients group = w->gradients[w->calls[source].group];
    const Costs *costs = w->costs;
    const int on_host = w->calls[source].queue != COMPUTE;
    int64_t nbytes = 0, on_disk = 0;
    for EACH(link, group.operands, w) {
        const Operand *operand = &w->step->operand[w->links[link].value];
        nbytes += operand->nbytes;
        if (w->choices->home[operand->home] & AT_DISK)
            on_disk += operand->nbytes;
    }
    int64_t moved = (int64_t)((double)on_disk * costs->on_disk_copies), workspace = 0;
    double us;
    if (on_host) {
        us = costs->passes * ((double)nbytes / costs->updating_gbps + 0.0 / costs->memory_gbps) / 1e3;
        double drive = drive_us(costs, moved);
        us = drive > us ? drive : us;
    } else {
        us = costs->passes * (0.0 / costs->updating_gbps + (double)nbytes / costs->memory_gbps) / 1e3;
        workspace = rounded((int64_t)((double)nbytes * costs->workspace_copies), costs->alignment);
    }
    if (state >= 0) {
        us += copy_us(costs, costs->streamed * nbytes, D2H);
        workspace = 0;
    }
    int32_t call = new_call(w, on_host ? HOST : state >= 0 ? D2H : COMPUTE, us, 1);
    w->calls[call].copied = state >= 0 ? costs->streamed * nbytes : 0;
    w->calls[call].streams = state >= 0;
    List reads = copied(w, group.buffers);
    if (scale >= 0)
        push(w, &reads, scale, 0);
    if (state >= 0)
        push(w, &reads, state, 0);
    w->calls[call].reads = reads;
    w->calls[call].updated = group.operands;
    w->calls[call].workspace = workspace;
    w->calls[call].update = group.name;
    w->calls[call].is_update = 1;
    if (on_disk)
        w->calls[call].read = w->calls[call].written = moved;
    return call;
}

/* Lists an update, and behind it what gathers the parameters that other hosts have updated parts of. */
static void list_update(Work *w, int32_t *listed, int32_t source, int32_t scale) {
    int32_t state = -1;
    if (w->calls[source].streams)
        listed[w->length++] = fetch_state(w, source, &state);
    const int32_t call = listed[w->length++] = update(w, source, scale, state);
    const List operands = w->calls[call].updated;
    int64_t nbytes = 0;
    for EACH(link, operands, w) {
        const Operand *operand = &w->step->operand[w->links[link].value];
        nbytes += operand->gathered == ALL_GATHER ? operand->nbytes : 0;
    }
    if (nbytes) {
        const int32_t gather = listed[w->length++] = new_call(w, NETWORK, collective_us(w->costs, nbytes, ALL_GATHER), 1);
        w->calls[gather].inputs = w->calls[gather].updated = operands;
    }
}

/* Lists the norms of the gradients of a source, which end at home: their buffer there is added to norms. */
static void list_norms(Work *w, int32_t *listed, int32_t source, List *norms, int64_t *norm_nbytes) {
    const Gradients group = w->gradients[w->calls[source].group];
    const int on_host = w->calls[source].queue != COMPUTE;
    const int64_t nbytes = rounded(group.count * (group.wide ? 8 : 4), w->costs->alignment), slot = rounded(nbytes, PLACEMENT);
    const int64_t read = (int64_t)((double)group.nbytes * (on_host ? w->costs->norm_copies : 1.0));
    const double us = (double)read / (on_host ? w->costs->host_gbps : w->costs->memory_gbps) / 1e3;
    const int32_t call = listed[w->length++] = new_call(w, on_host ? HOST : COMPUTE, us, 1);
    int32_t norm = new_buffer(w, on_host ? ON_HOST : POOLED, nbytes, slot, 0);
    w->calls[call].is_update = 1;
    w->calls[call].reads = copied(w, group.buffers);
    push(w, &w->calls[call].writes, norm, 0);
    if (!on_host) {
        const int32_t at_home = new_buffer(w, ON_HOST, nbytes, slot, 0);
        const int32_t copy = listed[w->length++] = copy_of(w, D2H, norm, at_home, nbytes, 1);
        w->calls[copy].is_update = 1;
        norm = at_home;
    }
    push(w, norms, norm, 0);
    *norm_nbytes += nbytes;
}

/* Lists the factor of all gradients, and a copy of it to the device if it is needed there. scale: its buffers, at home and
 * there. */
static void list_scale(Work *w, int32_t *listed, List norms, int64_t norm_nbytes, int wide, int on_device, int32_t scale[2]) {
    const int64_t nbytes = rounded(wide ? 8 : 4, w->costs->alignment), slot = rounded(nbytes, PLACEMENT);
    const int32_t call = listed[w->length++] = new_call(w, HOST, (double)norm_nbytes / w->costs->host_gbps / 1e3, 1);
    scale[0] = new_buffer(w, ON_HOST, nbytes, slot, 0);
    w->calls[call].is_update = 1;
    w->calls[call].reads = norms;
    push(w, &w->calls[call].writes, scale[0], 0);
    if (on_device) {
        scale[1] = new_buffer(w, ON_DEVICE, nbytes, slot, 0);
        const int32_t copy = listed[w->length++] = copy_of(w, H2D, scale[0], scale[1], nbytes, 1);
        w->calls[copy].is_update = 1;
    }
}

static void list_calls(Work *w, const Around *around) {
    w->order = mt_room(w, w->call_count + w->gradient_count, sizeof *w->order);
    for (int64_t position = 0; position < w->step->regions; position++) {
        for (int32_t call = around->before[position]; call >= 0; call = w->calls[call].next)
            w->order[w->length++] = call;
        w->order[w->length++] = (int32_t)position;
        for (int32_t call = around->behind[position]; call >= 0; call = w->calls[call].next)
            w->order[w->length++] = call;
    }
}

/* Brings the state for each update on the device before the update before it, so that one comes while another goes home. */
static void bring_state_ahead(Work *w) {
    int32_t *fetches = mt_room(w, w->length, sizeof *fetches), *listed = mt_room(w, w->length, sizeof *listed);
    int64_t count = 0, next = 1, length = 0;
    for (int64_t place = 0; place < w->length; place++)
        if (w->calls[w->order[place]].streams && w->calls[w->order[place]].queue == H2D)
            fetches[count++] = w->order[place];
    if (count < 2)
        return;
    for (int64_t place = 0; place < w->length; place++) {
        const Call *call = &w->calls[w->order[place]];
        if (call->streams && call->queue == H2D && w->order[place] != fetches[0])
            continue;
        if (call->streams && call->queue == D2H && next < count)
            listed[length++] = fetches[next++];
        listed[length++] = w->order[place];
    }
    w->order = listed;
}

static int64_t rank_of(const Work *w, int32_t source) {
    return w->choices->rank[w->step->leaving[w->gradients[w->calls[source].group].name].name];
}

/* Puts the updates where the plan wants them. */
static void list_updates(Work *w) {
    const int64_t count = w->length;
    int32_t *order = w->order, *read_last = mt_room(w, w->step->operands, sizeof *read_last);
    int32_t *sources = mt_room(w, w->gradient_count, sizeof *sources), *late = mt_room(w, w->gradient_count, sizeof *late);
    List *after = mt_room(w, count, sizeof *after);
    int64_t source_count = 0, late_count = 0;
    for (int64_t i = 0; i < w->step->operands; i++)
        read_last[i] = -1;
    for (int32_t place = 0; place < count; place++) {
        after[place] = EMPTY;
        const Call *call = &w->calls[order[place]];
        for EACH(link, call->inputs, w)
            read_last[w->links[link].value] = place;
        if (call->cast >= 0)
            for EACH(link, w->calls[call->cast].inputs, w)
                read_last[w->links[link].value] = place;
        if (w->calls[order[place]].group >= 0)
            sources[source_count++] = place;
    }
    for (int64_t i = 0; i < source_count; i++) {
        const Call *source = &w->calls[order[sources[i]]];
        int32_t turn = sources[i];
        if (w->choices->held) {
            late[late_count++] = sources[i];
            continue;
        }
        if (source->queue != COMPUTE) {
            if (w->choices->patient) {
                late[late_count++] = sources[i];
                continue;
            }
            int64_t ahead = w->choices->sets - 1; /* copies home of gradients that the update lets pass */
            for (int64_t j = i + 1; j < source_count && ahead; j++)
                if (w->calls[order[sources[j]]].queue != COMPUTE) {
                    turn = sources[j];
                    ahead--;
                }
        }
        for EACH(link, w->gradients[source->group].operands, w)
            if (read_last[w->links[link].value] > turn)
                turn = read_last[w->links[link].value];
        push(w, &after[turn], sources[i], 0);
    }
    for (int64_t i = 1; i < late_count && !w->choices->held; i++) { /* by rank; equal ones stay in order */
        int32_t moving = late[i];
        int64_t rank = rank_of(w, order[moving]), at = i;
        for (; at && rank_of(w, order[late[at - 1]]) > rank; at--)
            late[at] = late[at - 1];
        late[at] = moving;
    }
    for (int64_t i = 0; i < late_count; i++)
        push(w, &after[count - 1], late[w->choices->held ? late_count - 1 - i : i], 0);
    int32_t *listed = mt_room(w, count + 4 * source_count + 2, sizeof *listed), scale[2] = {-1, -1};
    List norms = EMPTY;
    int64_t norm_nbytes = 0;
    int wide = 0, on_device = 0;
    w->length = 0;
    for (int64_t place = 0, source = 0; place < count; place++) {
        if (!w->calls[order[place]].streams)
            listed[w->length++] = order[place];
        if (w->choices->held && source < source_count && sources[source] == place) {
            wide |= w->gradients[w->calls[order[place]].group].wide != 0;
            on_device |= w->calls[order[place]].queue == COMPUTE;
            list_norms(w, listed, order[place], &norms, &norm_nbytes);
            source++;
        }
        if (w->choices->held && place == count - 1)
            list_scale(w, listed, norms, norm_nbytes, wide, on_device, scale);
        for EACH(link, after[place], w) {
            const int32_t from = order[w->links[link].value];
            list_update(w, listed, from, scale[w->calls[from].queue == COMPUTE]);
        }
    }
    w->order = listed;
    bring_state_ahead(w);
}

/* Puts casts into the list: before a copy to the device, a region earlier than it, so that one value is cast while the one
 * before it is copied; and right behind a copy home. Leaves out what is gone. */
static void list_casts(Work *w) {
    const int64_t count = w->length;
    int32_t *listed = mt_room(w, w->call_count, sizeof *listed);
    List *before = mt_room(w, count, sizeof *before);
    for (int64_t place = 0; place < count; place++)
        before[place] = EMPTY;
    for (int64_t place = 0; place < count; place++) {
        const Call *call = &w->calls[w->order[place]];
        if (call->cast < 0 || call->queue != H2D)
            continue;
        int64_t at = place - 1;
        while (at >= 0 && !(w->order[at] < w->step->regions && w->calls[w->order[at]].phase == call->phase))
            at--;
        push(w, &before[at < 0 ? place : at], call->cast, 0);
    }
    w->length = 0;
    for (int64_t place = 0; place < count; place++) {
        const Call *call = &w->calls[w->order[place]];
        for EACH(link, before[place], w)
            listed[w->length++] = w->links[link].value;
        if (!call->gone)
            listed[w->length++] = w->order[place];
        if (call->cast >= 0 && call->queue == D2H)
            listed[w->length++] = call->cast;
    }
    w->order = listed;
}

void mt_moves(Work *w) {
    const Step *step = w->step;
    Around around = {mt_room(w, step->regions, sizeof(int32_t)), mt_room(w, step->regions, sizeof(int32_t)),
                     mt_room(w, step->regions, sizeof(int32_t))};
    for (int64_t position = 0; position < step->regions; position++) {
        around.before[position] = around.behind[position] = -1;
        int32_t call = new_call(w, COMPUTE, step->us[position], (int)step->region[position].phase);
        w->calls[call].workspace = step->region[position].workspace; /* its number is its position */
        w->calls[call].gone = (int32_t)step->region[position].gone;
    }
    Ends ends = {mt_room(w, step->region[step->regions].first_value, sizeof(List))};
    for (int64_t i = 0; i < step->region[step->regions].first_value; i++)
        ends.readers[i] = EMPTY;
    w->cast_buffers = mt_room(w, step->region[step->regions].first_read, sizeof *w->cast_buffers);
    fetch_all(w, &around, &ends);
    for (int64_t position = 0; position < step->regions; position++)
        make(w, &around, &ends, position);
    list_calls(w, &around);
    if (w->choices->updates && w->gradient_count)
        list_updates(w);
    int casts = 0;
    for (int64_t i = 0; i < w->call_count && !casts; i++)
        casts = w->calls[i].cast >= 0;
    if (casts)
        list_casts(w);
}
