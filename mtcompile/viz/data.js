// The picture, unpacked: typed arrays to search and draw from, and the few words every part of the page uses.

const byId = (id) => document.getElementById(id);
const column = (c) => (Array.isArray(c) ? c : c.at.map((i) => c.table[i]));
const columns = (table) => Object.fromEntries(Object.entries(table).map(([name, c]) => [name, column(c)]));

function make(tag, attributes = {}, ...children) {
  const node = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) {
    if (name.startsWith("on")) node.addEventListener(name.slice(2), value);
    else if (value !== undefined) node.setAttribute(name, value);
  }
  node.append(...children.filter((child) => child !== undefined && child !== ""));
  return node;
}

function timeText(us, digits = 3) {
  const size = Math.abs(us);
  if (size >= 1e6) return `${(us / 1e6).toPrecision(Math.max(digits, 1 + Math.floor(Math.log10(size / 1e6))))} s`;
  if (size >= 1e3) return `${(us / 1e3).toPrecision(digits)} ms`;
  return `${size && size < 10 ? us.toFixed(2) : us.toFixed(size < 100 ? 1 : 0)} µs`;
}

function bytesText(nbytes) {
  for (const [unit, size] of [["GiB", 2 ** 30], ["MiB", 2 ** 20], ["KiB", 2 ** 10]]) {
    if (Math.abs(nbytes) >= size) return `${(nbytes / size).toFixed(2)} ${unit}`;
  }
  return `${nbytes} B`;
}

const limitText = (limit) => (limit === null ? "no limit" : bytesText(limit));
const share = (part, whole) => (whole ? `${Math.round((100 * part) / whole)}\u00a0%` : "0\u00a0%");

// The first position of a sorted array with a number above x (or, with `equal`, of x at least).
function after(sorted, x, equal = false, from = 0) {
  let low = from, high = sorted.length;
  while (low < high) {
    const middle = (low + high) >> 1;
    if (equal ? sorted[middle] >= x : sorted[middle] > x) high = middle;
    else low = middle + 1;
  }
  return low;
}

function summed(differences) {
  let ns = 0;
  return Float64Array.from(differences, (difference) => (ns += difference) / 1000);
}

const P = JSON.parse(byId("picture").textContent);
const I = columns(P.instructions), B = columns(P.buffers), V = P.values;
const COUNT = I.op.length;
const TIERS = Object.keys(P.tiers);
const called = (value) => V.alias[value] || V.name[value];
const isWork = (i) => I.op[i] === "run" || I.op[i] === "copy";
const textOf = (i) => (isWork(i) ? I.text[i] : `${I.op[i]} ${called(B.value[I.writes[i][0]])}`);

const ALLOC = new Int32Array(B.name.length).fill(-1), FREE = new Int32Array(B.name.length).fill(-1);
for (let i = 0; i < COUNT; i++) {
  if (I.op[i] === "alloc") ALLOC[I.writes[i][0]] = i;
  if (I.op[i] === "free") FREE[I.writes[i][0]] = i;
}
const NEEDED = I.op.map(() => []); // by whom an instruction is waited for
I.deps.forEach((deps, i) => deps.forEach((dep) => NEEDED[dep].push(i)));

const ROLES = ["param", "grad", "state", "activation", "buffer", "constant", "input", "output", "tangent", "rng"];
// colour, colour of text on it, words
const PAINTS = {
  forward: ["sky", "#000", "forward kernel"], backward: ["orange", "#000", "backward kernel"],
  recompute: ["orange", "#000", "recomputes too", true], update: ["pink", "#000", "update, or cast on the host"],
  param: ["blue", "#fff", "parameters"], grad: ["red", "#fff", "gradients"], state: ["pink", "#000", "optimizer state"],
  activation: ["green", "#fff", "activations"], workspace: ["yellow", "#000", "workspace"], resident: ["held", "", "resident"],
  unused: ["unused", "", "arena, unused"], other: ["grey", "#000", "inputs, outputs, other"],
};
const paintOf = (name) => (PAINTS[name] ? name : "other");
const PLACES = { slot: "in slots of the arena", pooled: "pooled", resident: "", unused: "", workspace: "" };

// One tier of one trace: `total` and every series after each event; row 0 is before the first.
function unpackMemory(held) {
  const order = [["resident", ""], ...ROLES.map((role) => ["slot", role]), ["unused", ""],
    ...ROLES.map((role) => ["pooled", role]), ["workspace", ""]];
  const key = ([place, role]) => `${place} ${role}`;
  const there = new Set(held.series.map(key));
  if (held.resident) there.add("resident ");
  if (held.arena) there.add("unused ");
  const series = order.filter((pair) => there.has(key(pair)));
  const place = held.series.map((pair) => series.findIndex((other) => key(other) === key(pair)));
  const resident = series.findIndex((pair) => pair[0] === "resident"), unused = series.findIndex((pair) => pair[0] === "unused");
  const events = held.which.length, width = series.length;
  const rows = new Float64Array((events + 1) * width), total = new Float64Array(events + 1);
  const now = new Float64Array(width);
  if (resident >= 0) now[resident] = held.resident;
  if (unused >= 0) now[unused] = held.arena;
  const keep = (row) => { rows.set(now, row * width); total[row] = now.reduce((a, b) => a + b, 0); };
  keep(0);
  held.which.forEach((which, k) => {
    const at = place[which], change = held.nbytes[k] - now[at];
    now[at] = held.nbytes[k];
    if (series[at][0] === "slot") now[unused] = Math.max(0, now[unused] - change);
    keep(k + 1);
  });
  const colours = series.map(([where, role]) => paintOf(where === "slot" || where === "pooled" ? role : where));
  return { ...held, series, time: summed(held.after_ns), rows, total, width, colours };
}

function unpackTrace(trace) {
  const start = summed(trace.after_ns), end = start.map((us, i) => us + trace.took_ns[i] / 1000);
  const missing = new Set(trace.missing);
  const lanes = P.queues.map((queue) => {
    const here = [...Array(COUNT).keys()].filter((i) => I.queue[i] === queue && !missing.has(i));
    const boxes = Int32Array.from(here.filter(isWork)), ticks = Int32Array.from(here.filter((i) => !isWork(i)));
    const times = (ids, of) => Float64Array.from(ids, (i) => of[i]);
    return { boxes, start: times(boxes, start), end: times(boxes, end), ticks, at: times(ticks, start) };
  });
  const memory = Object.fromEntries(Object.entries(trace.memory).map(([tier, held]) => [tier, unpackMemory(held)]));
  const path = new Map(trace.critical.map((i, k) => [i, trace.because[k]]));
  const backward = I.phase.indexOf("backward");
  const turn = backward < 0 ? Infinity : start[backward];
  return { ...trace, start, end, missing, lanes, memory, path, turn, last: Math.max(1e-3, largest(end)) };
}

const largest = (numbers) => numbers.reduce((most, number) => Math.max(most, number), 0);

const TRACES = P.traces.map(unpackTrace);
// What is predicted ends with the update that follows the backward; what was measured has no record of it.
const updateOf = (trace) => (trace.source === "predicted" ? P.update_us : 0);
const END = largest(TRACES.map((trace) => trace.last + updateOf(trace)));

// What search looks through, of each instruction and each value.
const VALUE_TEXT = V.name.map((name, v) => `${name} ${V.alias[v]}`.toLowerCase());
const SEARCHED = I.op.map((op, i) => {
  const values = [...new Set([...I.reads[i], ...I.writes[i]].map((b) => B.value[b]))].map((v) => VALUE_TEXT[v]);
  return `#${i} ${op} ${I.queue[i]} ${I.text[i]} ${I.label[i]} ${I.kernel[i]}\n`.toLowerCase() + values.join("\n");
});
