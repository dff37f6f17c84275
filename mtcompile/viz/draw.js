// The canvas: overview, time axis, a lane per queue, memory per tier on the same axis. Only what is in view is drawn, and
// what is narrower than a pixel is merged into one box, so that time does not grow with the schedule.

const canvas = byId("canvas"), ctx = canvas.getContext("2d");
const GUTTER = 118, RIGHT = 12, OVERVIEW = 30, AXIS = 22, GAP = 12, TICKS = 5;
const FONT = '11px system-ui, -apple-system, "Segoe UI", Roboto, "Noto Sans", "Liberation Sans", sans-serif';
let width = 0, height = 0, rows = [], C = {}, stripes = null, small = null, overview = null;

// What everybody looks at; the page's tests do so too.
const mt = window.mt = {
  ready: false, view: [0, END], mode: TRACES.length > 1 ? "both" : TRACES[0]?.source ?? "predicted", theme: "light", critical: true,
  selected: null, hovered: null, query: "", matches: [], hit: -1, boxes: 0, drawMs: 0, count: COUNT,
};

const shown = () => TRACES.filter((trace) => mt.mode === "both" || trace.source === mt.mode);
const main = () => shown()[0];
const plotWidth = () => Math.max(10, width - GUTTER - RIGHT);
const xOf = (us) => GUTTER + ((us - mt.view[0]) / (mt.view[1] - mt.view[0])) * plotWidth();
const usAt = (x) => mt.view[0] + ((x - GUTTER) / plotWidth()) * (mt.view[1] - mt.view[0]);

function colours() {
  const style = getComputedStyle(document.documentElement);
  C = {};
  for (const name of ["blue", "sky", "green", "yellow", "orange", "red", "pink", "grey", "paper", "ink", "faint", "line", "grid", "shade",
    "held", "unused", "accent", "strong"]) C[name] = style.getPropertyValue(`--${name}`).trim();
  const tile = document.createElement("canvas");
  tile.width = tile.height = 6;
  const t = tile.getContext("2d");
  t.strokeStyle = "rgba(0,0,0,.38)";
  t.lineWidth = 1.4;
  for (const shift of [-6, 0, 6]) { t.beginPath(); t.moveTo(shift, 6); t.lineTo(shift + 6, 0); t.stroke(); }
  stripes = ctx.createPattern(tile, "repeat");
  overview = null;
}

function layout() {
  const scroll = byId("scroll"), scale = window.devicePixelRatio || 1;
  width = scroll.clientWidth;
  const both = shown().length > 1, room = scroll.clientHeight - OVERVIEW - AXIS - 2 * GAP;
  const weights = TIERS.map((tier) => (TRACES[0].memory[tier].which.length ? 3 : 1));
  const least = TIERS.reduce((sum, _, k) => sum + 34 + 18 * weights[k], 0) + GAP * TIERS.length;
  const lane = Math.max(both ? 40 : 28, Math.min(both ? 62 : 50, (room - least * 1.9) / P.queues.length));
  const rest = Math.max(least, room - lane * P.queues.length);
  rows = [];
  let y = OVERVIEW + AXIS + GAP / 2;
  P.queues.forEach((queue, k) => { rows.push({ queue, k, y, h: lane }); y += lane; });
  y += GAP;
  const parts = weights.reduce((a, b) => a + b, 0);
  TIERS.forEach((tier, k) => {
    const h = ((rest - GAP * TIERS.length) * weights[k]) / parts;
    rows.push({ tier, y, h });
    y += h + GAP;
  });
  height = Math.max(y, scroll.clientHeight);
  canvas.width = Math.round(width * scale);
  canvas.height = Math.round(height * scale);
  canvas.style.height = `${height}px`;
  ctx.setTransform(scale, 0, 0, scale, 0, 0);
  overview = null;
}

let asked = 0;
function draw() {
  if (!asked) asked = requestAnimationFrame(() => { asked = 0; drawNow(); });
}

function drawNow() {
  const began = performance.now();
  if (!TRACES.length) return;
  mt.boxes = 0;
  ctx.font = FONT;
  ctx.textBaseline = "middle";
  rect(C.paper, 0, 0, width, height);
  drawGrid();
  clipped(() => rows.forEach((row) => (row.queue ? drawLane(row) : drawTier(row))));
  clipped(() => shown().forEach(drawUpdate));
  clipped(() => mt.selected && drawSelected());
  rows.forEach(drawName);
  drawOverview();
  mt.drawMs = performance.now() - began;
}

function clipped(paint) {
  ctx.save();
  ctx.beginPath();
  ctx.rect(GUTTER, 0, plotWidth(), height);
  ctx.clip();
  paint();
  ctx.restore();
}

function rect(colour, x, y, w, h) {
  ctx.fillStyle = colour;
  ctx.fillRect(x, y, w, h);
}

function put(text, x, y, colour, align = "left", font = FONT) {
  ctx.font = font;
  ctx.textAlign = align;
  ctx.fillStyle = colour;
  ctx.fillText(text, x, y);
}

function drawGrid() {
  const [t0, t1] = mt.view, span = t1 - t0, y = OVERVIEW, turn = main().turn;
  const raw = span / Math.max(2, plotWidth() / 110), power = 10 ** Math.floor(Math.log10(raw));
  const step = power * [1, 2, 5, 10].find((m) => m * power >= raw);
  const digits = Math.max(3, 1 + Math.ceil(Math.log10(Math.max(1, t1 / step))));
  clipped(() => {
    if (turn < t1 && Number.isFinite(turn)) rect(C.shade, Math.max(GUTTER, xOf(turn)), y, width, height);
    ctx.fillStyle = C.grid;
    for (let t = Math.ceil(t0 / step) * step; t <= t1; t += step) ctx.fillRect(Math.round(xOf(t)), y + AXIS, 1, height);
    for (let t = Math.ceil(t0 / step) * step; t <= t1; t += step) {
      const x = Math.round(xOf(t)), covered = turn > t0 && turn < t1 && x > xOf(turn) - 118 && x < xOf(turn) + 66;
      if (!covered) put(t < step / 2 ? "0" : timeText(t, digits), x + 4, y + AXIS / 2 + 1, C.faint);
    }
    if (turn > t0 && turn < t1) {
      rect(C.faint, Math.round(xOf(turn)), y, 1, height);
      for (const [words, side] of [["forward", "right"], ["backward", "left"]]) {
        put(words, xOf(turn) + (side === "left" ? 6 : -6), y + AXIS / 2 + 1, C.ink, side, `600 ${FONT}`);
      }
    }
  });
  rect(C.line, 0, y + AXIS, width, 1);
}

function drawName(row) {
  rect(C.paper, 0, row.y, GUTTER, row.h);
  const trace = main(), middle = row.y + Math.min(row.h / 2, 30);
  if (row.queue) {
    put(row.queue, 14, middle - 7, C.ink, "left", `600 12px ${FONT.slice(5)}`);
    const busy = shown().map((each) => Math.round((100 * (each.busy_us[row.queue] ?? 0)) / each.span_us)).join(" / ");
    put(`busy ${busy}\u00a0%`, 14, middle + 8, C.faint);
    if (shown().length > 1) for (const each of shown()) put(each.source[0].toUpperCase(), GUTTER - 9, band(row, each).y + band(row, each).h / 2, C.faint, "center");
    rect(C.line, 0, row.y + row.h - 1, width, 1);
  } else {
    const { limit } = P.tiers[row.tier];
    put(`${row.tier} memory`, 14, row.y + 9, C.ink, "left", `600 12px ${FONT.slice(5)}`);
    put(`peak ${bytesText(trace.memory[row.tier].peak)}`, 14, row.y + 25, C.faint);
    if (row.h > 46) put(limit === null ? "no limit" : `of ${bytesText(limit)}`, 14, row.y + 40, C.faint);
  }
}

// Where a trace's boxes lie in a lane.
function band(row, trace) {
  const list = shown(), k = list.indexOf(trace), h = (row.h - 6 - TICKS * list.length) / list.length;
  return { y: row.y + 3 + k * (h + TICKS), h: h - 1 };
}

function eachBox(lane, paint) {
  const [t0, t1] = mt.view, px = (t1 - t0) / plotWidth(), { start, end } = lane;
  let k = after(end, t0);
  while (k < start.length && start[k] < t1) {
    let last = k;
    if (end[k] - start[k] < px) {
      last = Math.max(k, after(start, start[k] + px, true, k) - 1);
      if (last > k && end[last] - start[last] >= px) last--;
    }
    paint(k, last, start[k], Math.max(end[last], start[k] + px));
    k = last + 1;
  }
}

const found = new Uint8Array(COUNT); // by search
const alive = new Uint8Array(COUNT); // in the life of the selected value

function anyIn(has, lane, k, last) {
  for (; k <= last; k++) if (has(lane.boxes[k])) return true;
  return false;
}

function drawLane(row) {
  for (const trace of shown()) {
    const { y, h } = band(row, trace), lane = trace.lanes[row.k];
    const dim = mt.query ? found : mt.selected?.kind === "value" ? alive : null;
    eachBox(lane, (k, last, start, end) => {
      const i = lane.boxes[k], x0 = Math.max(xOf(start), GUTTER - 4), w = Math.min(xOf(end), width + 4) - x0;
      const paint = PAINTS[paintOf(I.paint[i])], wide = w > 3;
      ctx.globalAlpha = dim && !anyIn((i) => dim[i], lane, k, last) ? 0.16 : 1;
      rect(C[paint[0]], x0, y, Math.max(1, wide ? w - 1 : w), h);
      mt.boxes++;
      if (paint[3] && wide) rect(stripes, x0, y, w - 1, h);
      if (mt.critical && anyIn((i) => trace.path.has(i), lane, k, last)) {
        rect(C.strong, x0, y + h - 3, Math.max(1, wide ? w - 1 : w), 3);
      }
      if (w > 12 && h > 11) label(i, x0, y + (h - 2) / 2, w, paint);
      ctx.globalAlpha = 1;
    });
    drawTicks(lane, y + h + 1);
  }
}

// The update after the backward, over all lanes: which of them it takes, the user's optimizer decides.
function drawUpdate(trace) {
  const us = updateOf(trace), lanes = rows.filter((row) => row.queue);
  if (!us || !lanes.length) return;
  const y = lanes[0].y, end = lanes[lanes.length - 1];
  const x = Math.max(xOf(trace.last), GUTTER), w = xOf(trace.last + us) - x;
  if (w <= 0) return;
  ctx.globalAlpha = 0.35;
  rect(C.pink, x, y, Math.max(1, w), end.y + end.h - y);
  ctx.globalAlpha = 1;
  mt.boxes++;
  for (const words of [`optimizer.step(), ${timeText(us)}`, "step()"]) {
    ctx.font = FONT;
    if (ctx.measureText(words).width + 12 > w) continue;
    put(words, x + 6, y + 10, C.ink);
    return;
  }
}

// As much of what an instruction is as fits: all, its block, or the block's number.
const widths = new Map();
function label(i, x, y, w, paint) {
  const from = Math.max(x, GUTTER), room = x + w - from - 7, block = I.block[i];
  for (const words of [I.text[i], block, block.slice(block.lastIndexOf(".") + 1)]) {
    if (!widths.has(words)) {
      ctx.font = FONT;
      widths.set(words, ctx.measureText(words).width);
    }
    const needed = widths.get(words);
    if (!needed || needed > room) continue;
    if (paint[3]) { // readable on stripes
      rect(C[paint[0]], from + 1, y - 7, needed + 6, 14);
    }
    put(words, from + 4, y + 0.5, paint[1] || C.ink);
    return;
  }
}

// Allocs and frees take no time: marks under the boxes, at most one a pixel.
function drawTicks(lane, y) {
  const [t0, t1] = mt.view, px = (t1 - t0) / plotWidth();
  ctx.fillStyle = C.faint;
  for (let k = after(lane.at, t0, true); k < lane.at.length && lane.at[k] <= t1; k = after(lane.at, lane.at[k] + px, false, k)) {
    ctx.fillRect(Math.round(xOf(lane.at[k])), y, 1, TICKS - 2);
  }
}

// From bytes of a tier to pixels and back. Where little lies on much that is resident, that is drawn lower than it is.
const SQUEEZED = 0.25;
function scaleOf(row) {
  const { limit } = P.tiers[row.tier], peak = Math.max(...TRACES.map((trace) => trace.memory[row.tier].peak));
  const { resident, which } = TRACES[0].memory[row.tier], base = row.y + row.h;
  const near = limit !== null && limit - resident < 2.5 * (peak - resident), low = near ? Math.max(limit, peak) : peak;
  const squeezed = which.length > 0 && resident > 0.6 * peak, foot = squeezed ? SQUEEZED : resident / (low * 1.12 || 1);
  const top = squeezed ? resident + (low - resident) * 1.2 : low * 1.12;
  const up = (nbytes) => (nbytes <= resident ? (nbytes / (resident || 1)) * foot : foot + ((nbytes - resident) / (top - resident || 1)) * (1 - foot));
  const down = (part) => (part <= foot ? (part / (foot || 1)) * resident : resident + ((part - foot) / (1 - foot)) * (top - resident));
  return { top, squeezed, foot, y: (nbytes) => base - up(nbytes) * row.h, nbytes: (y) => down((base - y) / row.h) };
}

// Steps of a tier in view, as (x, width, row): of those within a pixel, the fullest.
function eachStep(held, paint) {
  const [t0, t1] = mt.view, { time, total } = held, px = (t1 - t0) / plotWidth();
  let k = after(time, t0), t = t0; // row k is what holds until event k
  while (t < t1) {
    const until = k < time.length ? Math.min(time[k], t1) : t1;
    if (until - t >= px || k >= time.length) {
      paint(xOf(t), xOf(until) - xOf(t), k);
      t = until;
      if (k >= time.length) break;
    }
    let fullest = k + 1;
    const edge = t + px;
    for (k++; k < time.length && time[k] < edge; k++) if (total[k + 1] > total[fullest]) fullest = k + 1;
    if (total[fullest] > total[k]) {
      paint(xOf(t), 1, fullest);
      t = edge;
    }
  }
}

function drawTier(row) {
  const trace = main(), held = trace.memory[row.tier], scale = scaleOf(row), { top } = scale, yOf = scale.y, base = row.y + row.h;
  const { peak, limit } = P.tiers[row.tier];
  eachStep(held, (from, wide, k) => {
    const x = Math.round(from), w = Math.max(1, Math.round(from + wide) - x);
    let y = base, under = 0;
    for (let s = 0; s < held.width; s++) {
      const nbytes = held.rows[k * held.width + s];
      if (!nbytes) continue;
      under += nbytes;
      const h = y - yOf(under), slot = held.series[s][0] === "slot";
      y -= h;
      rect(C[PAINTS[held.colours[s]][0]], x, y, w, h + 0.4);
      if (slot && w > 1) rect(stripes, x, y, w, h + 0.4);
    }
    mt.boxes++;
  });
  if (shown().length > 1) drawOutline(shown()[1].memory[row.tier], yOf);
  rect(C.line, GUTTER, base, plotWidth(), 1);
  if (row.h < 24) return;
  if (scale.squeezed) tag(`resident ${bytesText(held.resident)}, not to scale`, GUTTER + 4, base - (scale.foot * row.h) / 2, "left");
  if (limit !== null && limit <= top) {
    rect(C.strong, GUTTER, yOf(limit) - 1, plotWidth(), 2);
    tag(`budget ${bytesText(limit)}`, width - RIGHT - 4, Math.max(row.y + 7, yOf(limit) - 9), "right");
  } else if (limit !== null) tag(`budget ${bytesText(limit)}, above`, width - RIGHT - 4, row.y + 8, "right");
  ctx.strokeStyle = C.ink;
  ctx.setLineDash([3, 3]);
  ctx.beginPath();
  ctx.moveTo(GUTTER, Math.round(yOf(peak)) + 0.5);
  ctx.lineTo(width, Math.round(yOf(peak)) + 0.5);
  ctx.stroke();
  ctx.setLineDash([]);
  tag(`planned peak ${bytesText(peak)}`, GUTTER + 4, yOf(peak) + 10, "left");
}

// What was measured, over what was predicted.
function drawOutline(held, yOf) {
  ctx.strokeStyle = C.ink;
  ctx.lineWidth = 1.5;
  ctx.beginPath();
  eachStep(held, (x, w, k) => { ctx.lineTo(x, yOf(held.total[k])); ctx.lineTo(x + w, yOf(held.total[k])); });
  ctx.stroke();
  ctx.lineWidth = 1;
}

function tag(words, x, y, align) {
  ctx.font = FONT;
  const w = ctx.measureText(words).width + 8;
  ctx.globalAlpha = 0.86;
  rect(C.paper, align === "left" ? x - 4 : x - w + 4, y - 8, w, 16);
  ctx.globalAlpha = 1;
  put(words, x, y, C.ink, align);
}
