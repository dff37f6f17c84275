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
                                     .phase = phase, .update = -1, .group = -1, .next = -1, .us = us};
    return (int32_t)w->call_count++;
}

static int32_t new_gradients(Work *w) {
    if (w->gradient_count == w->gradient_room)
        w->gradients = mt_grown(w, w->gradients, &w->gradient_room, w->gradient_count, sizeof(Gradients));
    w->gradients[w->gradient_count] = (Gradients){EMPTY, EMPTY, -1};
    return (int32_t)w->gradient_count++;
}

/* ------------------------------------------------------------------------------------------------------------- what it costs */

static double copy_us(const Costs *costs, int64_t nbytes, int queue) {
    return costs->scale[queue] * ((double)nbytes / costs->gbps[queue] / 1e3);
}

static double direct_us(const Costs *costs, int64_t nbytes) { /* from disk to the device */
    return costs->direct_scale * ((double)nbytes / costs->direct_gbps / 1e3);
}

static double drive_us(const Costs *costs, int64_t nbytes) { /* read and written */
    return copy_us(costs, nbytes, DISK_READ) + costs->disk_write_scale * ((double)nbytes / costs->disk_write_gbps / 1e3);
}

/* The µs of rows, of crossing bytes, that are filled up to whole ones. */
static double rows_us(const Costs *costs, int64_t count, int64_t crossing, int64_t whole, int queue) {
    double zeros = queue == D2H ? (double)whole / costs->host_gbps / 1e3 : 0.0;
    return copy_us(costs, crossing, queue) + (double)count * costs->row_us + zeros;
}

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

static void insert_before(Work *w, Around *around, int64_t position, int32_t call) {
    if (around->before[position] < 0)
        around->before_last[position] = call;
    w->calls[call].next = around->before[position];
    around->before[position] = call;
}

static void insert_behind(Work *w, Around *around, int64_t position, int32_t call) {
    w->calls[call].next = around->behind[position];
    around->behind[position] = call;
}

/* The region before which a fetch is issued. */
static int64_t first_of(const Work *w, int64_t position, int64_t ahead) {
    int64_t least = w->step->region[position].phase ? w->step->first_backward : 0;
    return position - ahead > least ? position - ahead : least;
}

static int is_away(const Work *w, const Operand *operand) {
    return operand->weights ? !(w->choices->home[operand->home] & AT_DEVICE) : !operand->on_device;
}

/* ------------------------------------------------------------------------------------------------------------------- fetches */

/* Adds a buffer for the operands of each role to list. */
static void by_role(Work *w, int kind, List operands, List *list) {
    const Operand *operand = w->step->operand;
    for EACH(link, operands, w) {
        int64_t role = operand[w->links[link].value].role, nbytes = 0, slot = 0;
        int seen = 0;
        for (int32_t other = operands.first; other != link && !seen; other = w->links[other].next)
            seen = operand[w->links[other].value].role == role;
        if (seen)
            continue;
        for (int32_t other = link; other >= 0; other = w->links[other].next) {
            const Operand *alike = &operand[w->links[other].value];
            if (alike->role == role)
                nbytes += kind == ON_HOST ? alike->nbytes : alike->there_nbytes,
                    slot += kind == ON_HOST ? alike->read_slot : alike->there_slot;
        }
        const int32_t buffer = new_buffer(w, kind, nbytes, slot, 0);
        w->buffers[buffer].by_disk = kind == ON_HOST;
        push(w, list, buffer, 0);
    }
}

/* A read from disk for a region, which fetches as many regions ahead. Returns the buffers on the host that it fills. */
static List read_from_disk(Work *w, Around *around, int64_t position, List operands, int64_t nbytes, int64_t ahead) {
    double us = copy_us(w->costs, nbytes, DISK_READ);
    int32_t read = new_call(w, DISK_READ, us, (int)w->step->region[position].phase);
    List writes = EMPTY;
    w->calls[read].inputs = operands;
    w->calls[read].read = nbytes;
    by_role(w, ON_HOST, operands, &writes);
    w->calls[read].writes = writes;
    append_before(w, around, first_of(w, position, ahead + w->choices->disk_lookahead), read);
    return writes;
}

/* before: how many fragments of the home the region reads that precede these. */
static void fetch_group(Work *w, Around *around, int64_t position, List operands, int64_t before, int32_t *staying) {
    const Step *step = w->step;
    const Operand *first = &step->operand[w->links[operands.first].value];
    const uint8_t home = w->choices->home[first->home];
    const int phase = (int)step->region[position].phase, stays = !phase && (home & STAYS) && !(home & AT_DEVICE);
    const int kind = w->choices->pooled || stays ? POOLED : ON_DEVICE;
    const int64_t ahead = before + (phase && (home & LATE) ? 0 : w->choices->lookahead);
    const int in_rows = first->row_count >= 0;
    int64_t nbytes = 0;
    for EACH(link, operands, w)
        nbytes += step->operand[w->links[link].value].nbytes;
    double us = in_rows ? rows_us(w->costs, first->row_count, first->row_nbytes, nbytes, H2D) : copy_us(w->costs, nbytes, H2D);
    int32_t fetch = new_call(w, H2D, us, phase);
    w->calls[fetch].copied = in_rows ? first->row_nbytes : nbytes;
    if (home & AT_DISK && w->choices->disk_direct && !in_rows) {
        w->calls[fetch].us = direct_us(w->costs, nbytes);
        w->calls[fetch].inputs = operands;
        w->calls[fetch].read = nbytes;
    } else if (home & AT_DISK) {
        List reads = read_from_disk(w, around, position, operands, nbytes, ahead);
        w->calls[fetch].reads = reads;
    } else {
        w->calls[fetch].inputs = operands;
    }
    List writes = EMPTY;
    if (stays) {
        for EACH(link, operands, w) {
            const int32_t number = w->links[link].value;
            staying[number] = new_buffer(w, kind, step->operand[number].there_nbytes, step->operand[number].there_slot, 0);
            push(w, &writes, staying[number], 0);
        }
    } else {
        by_role(w, kind, operands, &writes);
    }
    w->calls[fetch].writes = writes;
    for EACH(link, writes, w)
        push(w, &w->calls[position].reads, w->links[link].value, 0);
    append_before(w, around, first_of(w, position, ahead), fetch);
}

/* Lists what comes in for each region, a copy per home. */
static void fetch_all(Work *w, Around *around) {
    const Step *step = w->step;
    int32_t *staying = mt_room(w, step->operands, sizeof *staying); /* operand -> buffer */
    List *groups = mt_room(w, step->operands, sizeof *groups);
    int64_t *before = mt_room(w, step->operands, sizeof *before); /* by group: fragments of its home in groups before */
    for (int64_t i = 0; i < step->operands; i++)
        staying[i] = -1;
    for (int64_t position = 0; position < step->regions; position++) {
        const Region *region = &step->region[position];
        int64_t count = 0;
        for (int64_t at = region->first_read; at < region[1].first_read; at++) {
            const int32_t number = (int32_t)step->reads[at];
            const Operand *operand = &step->operand[number];
            if (region->phase && staying[number] >= 0) {
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
                    if (first->home == operand->home && first->row_count < 0 && before[i] == fragments)
                        group = i;
                }
                if (group == count) {
                    before[count] = fragments;
                    groups[count++] = EMPTY;
                }
                push(w, &groups[group], number, 0);
            }
        }
        for (int64_t i = 0; i < count; i++)
            fetch_group(w, around, position, groups[i], before[i], staying);
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

/* A value that goes home behind its region, and comes back before later ones. */
static void waits_at_home(Work *w, Around *around, int64_t position, const Value *value) {
    const Region *region = w->step->region;
    const int64_t *reader = w->step->readers + region[position].first_reader + value->first_reader;
    int32_t result = new_buffer(w, POOLED, value->nbytes, value->slot, (int)value->returned), current = result, at_home = -1;
    int64_t previous = position;
    push(w, &w->calls[position].writes, result, 0);
    for (int64_t i = 0; i < value->readers; i++) {
        int64_t use = reader[i];
        int same_phase = region[previous].phase == region[use].phase;
        if (!(use - previous <= 1 && (same_phase || current == result))) {
            if (at_home < 0) {
                at_home = new_buffer(w, ON_HOST, value->nbytes, value->slot, 0);
                int32_t home = new_call(w, D2H, copy_us(w->costs, value->nbytes, D2H), (int)region[position].phase);
                push(w, &w->calls[home].reads, result, 0);
                push(w, &w->calls[home].writes, at_home, 0);
                w->calls[home].copied = value->nbytes;
                insert_behind(w, around, position, home);
            }
            current = new_buffer(w, w->choices->pooled ? POOLED : ON_DEVICE, value->nbytes, value->slot, 0);
            int32_t back = new_call(w, H2D, copy_us(w->costs, value->nbytes, H2D), (int)region[use].phase);
            push(w, &w->calls[back].reads, at_home, 0);
            push(w, &w->calls[back].writes, current, 0);
            w->calls[back].copied = value->nbytes;
            int64_t between = use - previous - 1;
            int64_t ahead = w->choices->lookahead < between ? w->choices->lookahead : between;
            if (region[use].phase && w->choices->at_host[value->name] > 1)
                insert_before(w, around, use, back);
            else
                append_before(w, around, first_of(w, use, ahead), back);
        }
        push(w, &w->calls[use].reads, current, 0);
        previous = use;
    }
}

/* Gradients and new buffers: a copy home per home, or an update on the device. */
static void leave(Work *w, Around *around, int64_t position) {
    const Step *step = w->step;
    const int64_t first = step->region[position].first_leaving, end = step->region[position + 1].first_leaving;
    const int updates = w->choices->updates != 0;
    const int64_t before = w->call_count;
    int32_t here = -1;
    for (int64_t i = first; i < end; i++) {
        const Leaving *entry = &step->leaving[i];
        const Operand *of = &step->operand[entry->operand];
        if (!is_away(w, of)) {
            int updated = entry->updates && updates;
            int32_t buffer = stays(w, position, entry->first_reader, entry->readers, entry->nbytes, entry->slot, !updated);
            if (updated) {
                if (here < 0) {
                    here = new_gradients(w);
                    w->gradients[here].name = (int32_t)i;
                }
                push(w, &w->gradients[here].operands, (int32_t)entry->operand, 0);
                push(w, &w->gradients[here].buffers, buffer, 0);
            }
        }
    }
    w->calls[position].group = here;
    for (int64_t i = first; i < end; i++) { /* a copy for each home, when its first entry is seen */
        const Leaving *entry = &step->leaving[i];
        const Operand *of = &step->operand[entry->operand];
        if (!is_away(w, of))
            continue;
        int seen = 0;
        for (int64_t j = first; j < i && !seen; j++) {
            const Operand *other = &step->operand[step->leaving[j].operand];
            int alike = of->row_count >= 0 ? other == of : other->row_count < 0;
            seen = is_away(w, other) && step->leaving[j].home == entry->home && alike;
        }
        if (seen)
            continue;
        int32_t copy = new_call(w, D2H, 0.0, (int)step->region[position].phase), gradients = -1;
        int64_t nbytes = 0, updated_nbytes = 0, updated_slot = 0;
        for (int64_t j = i; j < end; j++) {
            const Leaving *alike = &step->leaving[j];
            const Operand *operand = &step->operand[alike->operand];
            if (!is_away(w, operand) || alike->home != entry->home ||
                (of->row_count >= 0 ? operand != of : operand->row_count >= 0))
                continue;
            nbytes += alike->nbytes;
            int32_t made = stays(w, position, alike->first_reader, alike->readers, alike->nbytes, alike->slot, 0);
            push(w, &w->calls[copy].reads, made, 0);
            if (alike->updates && updates) {
                if (gradients < 0) {
                    gradients = new_gradients(w);
                    w->gradients[gradients].name = (int32_t)j;
                }
                push(w, &w->gradients[gradients].operands, (int32_t)alike->operand, 0);
                updated_nbytes += alike->at_home_nbytes, updated_slot += alike->at_home_slot;
            }
        }
        const int in_rows = of->row_count >= 0;
        w->calls[copy].us = in_rows ? rows_us(w->costs, of->row_count, entry->crossing, entry->whole, D2H)
                                    : copy_us(w->costs, nbytes, D2H);
        w->calls[copy].copied = in_rows ? entry->crossing : nbytes;
        w->calls[copy].early = (w->choices->home[entry->home] & EARLY) != 0;
        if (gradients >= 0) {
            int32_t at_home = new_buffer(w, ON_HOST, updated_nbytes, updated_slot, 0);
            push(w, &w->gradients[gradients].buffers, at_home, 0);
            push(w, &w->calls[copy].writes, at_home, 0);
            w->calls[copy].group = gradients;
        }
    }
    for (int32_t copy = (int32_t)w->call_count - 1; copy >= before; copy--) /* the first one comes first */
        insert_behind(w, around, position, copy);
}

static void make(Work *w, Around *around, int64_t position) {
    const Region *region = &w->step->region[position];
    const Value *value = w->step->value;
    for (int64_t i = region->first_value; i < region->first_other; i++)
        if (w->choices->at_host[value[i].name])
            waits_at_home(w, around, position, &value[i]);
    const int64_t first = region->first_value;
    typedef struct { int64_t nbytes, slot, listed; } Size;
    Size *together = mt_zeros(w, region->first_other - first, sizeof *together); /* by group: what stays alike is one buffer */
    for (int64_t i = first; i < region->first_other; i++)
        if (!w->choices->at_host[value[i].name])
            together[value[i].group].nbytes += value[i].nbytes, together[value[i].group].slot += value[i].slot;
    for (int64_t i = first; i < region->first_other; i++) {
        Size *size = &together[value[i].group];
        if (!w->choices->at_host[value[i].name] && !size->listed++)
            stays(w, position, value[i].first_reader, value[i].readers, size->nbytes, size->slot, value[i].returned);
    }
    for (int64_t i = region->first_other; i < region[1].first_value; i++)
        stays(w, position, value[i].first_reader, value[i].readers, value[i].nbytes, value[i].slot, value[i].returned);
    leave(w, around, position);
}

/* ------------------------------------------------------------------------------------------------------------------- updates */

static int32_t update(Work *w, int32_t source) {
    const Gradients group = w->gradients[w->calls[source].group];
    const Costs *costs = w->costs;
    const int on_host = w->calls[source].queue == D2H;
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
        workspace = (int64_t)((double)nbytes * costs->workspace_copies);
        workspace = (workspace + costs->alignment - 1) / costs->alignment * costs->alignment;
    }
    int32_t call = new_call(w, on_host ? HOST : COMPUTE, us, 1);
    w->calls[call].reads = group.buffers;
    w->calls[call].updated = group.operands;
    w->calls[call].workspace = workspace;
    w->calls[call].update = group.name;
    if (on_disk)
        w->calls[call].read = w->calls[call].written = moved;
    return call;
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
        for EACH(link, w->calls[order[place]].inputs, w)
            read_last[w->links[link].value] = place;
        if (w->calls[order[place]].group >= 0)
            sources[source_count++] = place;
    }
    for (int64_t i = 0; i < source_count; i++) {
        const Call *source = &w->calls[order[sources[i]]];
        int32_t turn = sources[i];
        if (source->queue == D2H) {
            if (w->choices->patient) {
                late[late_count++] = sources[i];
                continue;
            }
            int64_t ahead = w->choices->sets - 1; /* copies home of gradients that the update lets pass */
            for (int64_t j = i + 1; j < source_count && ahead; j++)
                if (w->calls[order[sources[j]]].queue == D2H) {
                    turn = sources[j];
                    ahead--;
                }
        }
        for EACH(link, w->gradients[source->group].operands, w)
            if (read_last[w->links[link].value] > turn)
                turn = read_last[w->links[link].value];
        push(w, &after[turn], sources[i], 0);
    }
    for (int64_t i = 1; i < late_count; i++) { /* by rank; equal ones stay in order */
        int32_t moving = late[i];
        int64_t rank = rank_of(w, order[moving]), at = i;
        for (; at && rank_of(w, order[late[at - 1]]) > rank; at--)
            late[at] = late[at - 1];
        late[at] = moving;
    }
    for (int64_t i = 0; i < late_count; i++)
        push(w, &after[count - 1], late[i], 0);
    int32_t *whole = mt_room(w, count + source_count, sizeof *whole);
    w->length = 0;
    for (int64_t place = 0; place < count; place++) {
        whole[w->length++] = order[place];
        for EACH(link, after[place], w)
            whole[w->length++] = update(w, order[w->links[link].value]);
    }
    w->order = whole;
}

void mt_moves(Work *w) {
    const Step *step = w->step;
    Around around = {mt_room(w, step->regions, sizeof(int32_t)), mt_room(w, step->regions, sizeof(int32_t)),
                     mt_room(w, step->regions, sizeof(int32_t))};
    for (int64_t position = 0; position < step->regions; position++) {
        around.before[position] = around.behind[position] = -1;
        int32_t call = new_call(w, COMPUTE, step->us[position], (int)step->region[position].phase);
        w->calls[call].workspace = step->region[position].workspace; /* its number is its position */
    }
    fetch_all(w, &around);
    for (int64_t position = 0; position < step->regions; position++)
        make(w, &around, position);
    list_calls(w, &around);
    if (w->choices->updates && w->gradient_count)
        list_updates(w);
}
