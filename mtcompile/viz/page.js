// What a reader does: move, zoom, point, click, search, type; and the state that follows.

const NARROWEST_US = 0.05; // of a view

function look(t0, t1) {
  const span = Math.min(Math.max(t1 - t0, NARROWEST_US), END * 1.02);
  const from = Math.min(Math.max(t0, -0.01 * END), END * 1.01 - span);
  mt.view = [from, from + span];
  draw();
}

const fit = () => look(-0.01 * END, 1.01 * END);
const pan = (part) => look(mt.view[0] + part * (mt.view[1] - mt.view[0]), mt.view[1] + part * (mt.view[1] - mt.view[0]));

function zoom(factor, at = (mt.view[0] + mt.view[1]) / 2) {
  look(at - (at - mt.view[0]) * factor, at + (mt.view[1] - at) * factor);
}

// So that an instruction is in view, and wide enough to be seen.
function reveal(i, closer = false) {
  const { start, end } = main(), took = Math.max(end[i] - start[i], NARROWEST_US), span = mt.view[1] - mt.view[0];
  const hidden = end[i] < mt.view[0] + 0.02 * span || start[i] > mt.view[1] - 0.02 * span, thin = took / span < 4 / plotWidth();
  if (!closer && !hidden && !thin) return;
  const wanted = closer || thin ? took * (closer ? 3 : 60) : span, middle = (start[i] + end[i]) / 2;
  look(middle - wanted / 2, middle + wanted / 2);
}

function select(kind, index = 0, more = {}) {
  mt.selected = kind ? { kind, index, ...more } : null;
  alive.fill(0);
  if (kind === "value") for (const part of ["made", "moved", "used", "freed"]) for (const i of V[part][index]) alive[i] = 1;
  if (kind === "instruction") reveal(index);
  showPanel();
  byId("live").textContent = !kind ? "" : kind === "value" ? `value ${called(index)}` : kind === "moment" ? `${more.tier} memory` :
    `${textOf(index)}, ${I.queue[index]}, ${spent(index)} from ${timeText(main().start[index], 4)}`;
  draw();
}

// -------------------------------------------------------------------------------------------------------------- pointing

function rowAt(y) {
  return rows.find((each) => y >= each.y && y < each.y + each.h + (each.tier ? 1 : 0));
}

// The instruction at a place of the canvas, or -1: a box, at most 3 px away, or a mark of an alloc or free.
function instructionAt(x, y) {
  const where = rowAt(y);
  if (!where?.queue || x < GUTTER) return -1;
  const trace = shown().find((each) => y < band(where, each).y + band(where, each).h + TICKS) ?? shown()[shown().length - 1];
  const lane = trace.lanes[where.k], t = usAt(x), near = 3 * (usAt(1) - usAt(0));
  if (y > band(where, trace).y + band(where, trace).h) {
    const k = after(lane.at, t - near, true);
    return k < lane.at.length && lane.at[k] <= t + near ? lane.ticks[k] : -1;
  }
  const k = after(lane.end, t);
  const gap = (j) => (j < 0 || j >= lane.boxes.length ? Infinity : Math.max(lane.start[j] - t, t - lane.end[j], 0));
  const best = gap(k) <= gap(k - 1) ? k : k - 1;
  return gap(best) <= near ? lane.boxes[best] : -1;
}

// The series of a tier's stack at a height, if any.
function seriesAt(where, us, y) {
  const held = main().memory[where.tier], k = after(held.time, us);
  let above = scaleOf(where).nbytes(y);
  for (let s = 0; s < held.width; s++) {
    above -= held.rows[k * held.width + s];
    if (above < 0) return held.series[s];
  }
  return undefined;
}

function hover(x, y, pageX, pageY) {
  const where = rowAt(y), i = instructionAt(x, y);
  mt.hovered = i < 0 ? null : i;
  canvas.style.cursor = i >= 0 ? "pointer" : "";
  if (i >= 0) tip(tipOfInstruction(i), pageX, pageY);
  else if (where?.tier && x >= GUTTER) tip(tipOfMoment(where.tier, usAt(x)), pageX, pageY);
  else tip(null);
}

function click(x, y) {
  const where = rowAt(y), i = instructionAt(x, y);
  if (i >= 0) select("instruction", i);
  else if (where?.tier && x >= GUTTER) {
    const us = usAt(x), series = seriesAt(where, us, y), named = series && ["slot", "pooled"].includes(series[0]);
    select("moment", 0, { tier: where.tier, us, series: named ? series : undefined });
  } else select(null);
}

let drag = null;
canvas.addEventListener("pointerdown", (event) => {
  canvas.setPointerCapture(event.pointerId);
  drag = { x: event.offsetX, view: mt.view, moved: false, whole: event.offsetY < OVERVIEW };
  if (drag.whole) jump(event.offsetX);
});
canvas.addEventListener("pointermove", (event) => {
  if (!drag) return hover(event.offsetX, event.offsetY, event.clientX, event.clientY);
  if (drag.whole) return jump(event.offsetX);
  if (!drag.moved && Math.abs(event.offsetX - drag.x) < 4) return undefined;
  drag.moved = true;
  canvas.classList.add("dragging");
  tip(null);
  const by = ((event.offsetX - drag.x) / plotWidth()) * (drag.view[1] - drag.view[0]);
  return look(drag.view[0] - by, drag.view[1] - by);
});
canvas.addEventListener("pointerup", (event) => {
  if (drag && !drag.moved && !drag.whole) click(event.offsetX, event.offsetY);
  canvas.classList.remove("dragging");
  drag = null;
});
canvas.addEventListener("pointercancel", () => { drag = null; });
canvas.addEventListener("pointerleave", () => tip(null));
canvas.addEventListener("dblclick", (event) => {
  const i = instructionAt(event.offsetX, event.offsetY);
  if (i >= 0) reveal(i, true);
});
canvas.addEventListener("wheel", (event) => {
  event.preventDefault();
  tip(null);
  const sideways = event.shiftKey ? event.deltaY || event.deltaX : event.deltaX;
  if (Math.abs(sideways) > Math.abs(event.deltaY) || event.shiftKey) pan(sideways / plotWidth());
  else zoom(Math.exp(Math.max(-1, Math.min(1, event.deltaY / 320))), usAt(Math.max(GUTTER, event.offsetX)));
}, { passive: false });

function jump(x) { // by the overview
  const at = ((x - GUTTER) / plotWidth()) * END, half = (mt.view[1] - mt.view[0]) / 2;
  look(at - half, at + half);
}

// --------------------------------------------------------------------------------------------------------------- search

function search(query) {
  mt.query = query.trim().toLowerCase();
  mt.matches = [];
  mt.hit = -1;
  found.fill(0);
  if (mt.query) {
    for (let i = 0; i < COUNT; i++) if (SEARCHED[i].includes(mt.query)) { found[i] = 1; mt.matches.push(i); }
  }
  byId("count").textContent = mt.query ? `${mt.matches.length}` : "";
  draw();
}

// The next match, copies and kernels before what takes no time.
function next() {
  const { start } = main(), work = mt.matches.filter(isWork), among = work.length ? work : mt.matches;
  if (!among.length) return;
  mt.hit = (mt.hit + 1) % among.length;
  const order = [...among].sort((a, b) => start[a] - start[b]);
  select("instruction", order[mt.hit]);
  byId("count").textContent = `${mt.hit + 1} / ${among.length}`;
}

byId("search").addEventListener("input", (event) => search(event.target.value));
byId("search").addEventListener("keydown", (event) => {
  if (event.key === "Enter") next();
  if (event.key === "Escape") {
    event.target.value = "";
    search("");
    canvas.focus();
  }
  event.stopPropagation();
});

// ------------------------------------------------------------------------------------------------------ modes and theme

const sources = TRACES.map((trace) => trace.source);
const MODES = sources.length > 1 ? [...sources, "both"] : sources;

function setMode(mode) {
  mt.mode = mode;
  if (MODES.length > 1) {
    byId("modes").replaceChildren(...MODES.map((each) => make("button", { "aria-pressed": `${each === mode}`, title: "m", onclick: () => setMode(each) },
      each[0].toUpperCase() + each.slice(1))));
  }
  layout();
  showLegend();
  showPanel();
  draw();
}

function setTheme(theme) {
  mt.theme = theme;
  document.documentElement.dataset.theme = theme;
  byId("theme").textContent = theme === "dark" ? "Light" : "Dark";
  colours();
  draw();
}

function setCritical(on) {
  mt.critical = on;
  byId("critical").setAttribute("aria-pressed", `${on}`);
  showLegend();
  draw();
}

// Along the queue of what is selected, or of compute.
function step(by) {
  const i = mt.selected?.kind === "instruction" ? mt.selected.index : -1;
  const lane = main().lanes[i < 0 ? 0 : P.queues.indexOf(I.queue[i])];
  const k = i < 0 ? -1 : lane.boxes.indexOf(i);
  const at = k >= 0 ? k + by : i < 0 ? after(lane.end, mt.view[0]) : after(lane.start, main().start[i]) + (by < 0 ? -1 : 0);
  if (lane.boxes.length) select("instruction", lane.boxes[Math.min(Math.max(at, 0), lane.boxes.length - 1)]);
}

const ACTIONS = {
  "+": () => zoom(0.6), "=": () => zoom(0.6), "-": () => zoom(1 / 0.6), _: () => zoom(1 / 0.6), 0: fit, Home: fit,
  ArrowLeft: (event) => pan(event.shiftKey ? -0.9 : -0.15), ArrowRight: (event) => pan(event.shiftKey ? 0.9 : 0.15),
  "/": () => byId("search").select(), n: () => step(1), p: () => step(-1), t: () => setTheme(mt.theme === "dark" ? "light" : "dark"),
  m: () => setMode(MODES[(MODES.indexOf(mt.mode) + 1) % MODES.length]), c: () => setCritical(!mt.critical), a: () => showTables(), "?": showKeys,
  Escape: () => select(null),
  Enter: () => mt.selected?.kind === "instruction" && reveal(mt.selected.index, true),
};

document.addEventListener("keydown", (event) => {
  if (event.ctrlKey || event.metaKey || event.altKey || document.querySelector("dialog[open]")) return;
  if (event.key === "Enter" && document.activeElement !== canvas && document.activeElement !== document.body) return;
  const action = ACTIONS[event.key];
  if (!action) return;
  event.preventDefault();
  tip(null);
  action(event);
});

for (const [id, action] of [["in", "+"], ["out", "-"], ["fit", "0"], ["theme", "t"], ["help", "?"], ["text", "a"], ["critical", "c"]]) {
  byId(id).addEventListener("click", (event) => ACTIONS[action](event));
}

// Where an instruction's box is on the page, in pixels: for whoever drives it.
mt.place = (i, trace = main()) => {
  const { x0, x1, y, h } = boxOf(trace, i), box = canvas.getBoundingClientRect();
  return { x: box.left + (x0 + x1) / 2, y: box.top + y + h / 2, width: x1 - x0 };
};
mt.rows = () => rows;
mt.draw = drawNow;

function begin() {
  const trace = TRACES[0], steps = P.step;
  const peaks = TIERS.map((tier) => `${tier} peak ${bytesText(P.tiers[tier].peak)}${P.tiers[tier].limit === null ? "" : ` of ${bytesText(P.tiers[tier].limit)}`}`);
  byId("facts").append(make("b", {}, steps), ` · limited by ${trace.limit} · ${COUNT} instructions`);
  const bound = P.bound ? `Planned: ${P.bound}` : "";
  Object.assign(byId("bound"), { textContent: bound, title: bound, hidden: !bound });
  byId("summary").textContent = `Step of ${COUNT} instructions: ${steps}, limited by ${trace.limit}; ${peaks.join("; ")}.${bound && ` ${bound}.`}`;
  canvas.setAttribute("aria-label", "Timeline of the step. Press a for everything as tables, n and p to go through instructions, ? for keys");
  const dark = matchMedia("(prefers-color-scheme: dark)");
  dark.addEventListener("change", () => setTheme(dark.matches ? "dark" : "light"));
  setTheme(dark.matches ? "dark" : "light");
  setMode(mt.mode);
  fit();
  new ResizeObserver(() => { layout(); drawNow(); }).observe(byId("scroll"));
  mt.ready = true;
}

if (TRACES.length) begin();
else byId("facts").textContent = "an empty schedule: nothing runs";
