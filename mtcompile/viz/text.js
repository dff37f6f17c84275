// Everything in words: the panel beside the canvas, the tooltip, the tables, what a screen reader is told.

const WHY = { queue: "after the one before it on its queue", dep: "after one that it waits for",
  phase: "after the end of the earlier phase", ahead: "after the step before", start: "at the start" };

function panel(title, subtitle, close, ...children) {
  const head = make("div", { class: "head" }, make("div", {}, make("h2", {}, title), make("p", { class: "sub" }, subtitle)),
    close ? make("button", { "aria-label": "Close (Escape)", title: "Close (Escape)", onclick: () => select(null) }, "×") : "");
  byId("panel").replaceChildren(head, ...children);
  byId("panel").scrollTop = 0;
}

const facts = (pairs) => make("dl", {}, ...pairs.filter((pair) => pair && pair[1] !== "").flatMap(([name, value]) => [
  make("dt", {}, name), make("dd", {}, value)]));

function swatch(paint) {
  const [colour, , , striped] = PAINTS[paintOf(paint)];
  return make("i", { class: `swatch${striped ? " striped" : ""}`, style: `background-color: var(--${colour})` });
}

const row = (paint, what, how, go) => make("li", {}, make("button", { onclick: go, title: what }, paint ? swatch(paint) : "",
  make("span", { class: "what" }, what), make("span", { class: "how" }, how)));
const spent = (i, trace = main()) => timeText(trace.end[i] - trace.start[i]);
const rowOf = (i) => row(isWork(i) ? I.paint[i] : "unused", textOf(i), isWork(i) ? `${spent(i)}  #${i}` : `#${i}`, () => select("instruction", i));
const valueRow = (b) => row(B.role[b], called(B.value[b]), bytesText(B.nbytes[b]), () => select("value", B.value[b]));

// A heading and its rows; the first `most` of them, and a button for the rest.
function list(title, items, of, most = 12) {
  if (!items.length) return "";
  const ul = make("ul", { class: "rows" }, ...items.slice(0, most).map(of));
  if (items.length > most) {
    const more = make("li", {}, make("button", { onclick: () => { more.remove(); ul.append(...items.slice(most, most + 500).map(of)); } },
      make("span", { class: "how" }, `${items.length - most} more`)));
    ul.append(more);
  }
  return make("section", {}, make("h3", {}, items.length > 1 ? `${title} (${items.length})` : title), ul);
}

function showPanel() {
  if (!mt.selected) return showOverview();
  return mt.selected.kind === "value" ? showValue(mt.selected.index) : mt.selected.kind === "moment" ? showMoment(mt.selected) : showInstruction(mt.selected.index);
}

function showOverview() {
  const trace = main();
  const busy = P.queues.map((queue) => {
    const part = (trace.busy_us[queue] ?? 0) / trace.span_us, exposed = trace.exposed_us[queue];
    const words = exposed === undefined ? "" : exposed > 0 ? `, ${timeText(exposed)} while compute is idle` : ", hidden behind compute";
    return make("div", { class: "queue" }, make("div", {}, make("span", {}, queue), make("span", {}, `${timeText(trace.busy_us[queue] ?? 0)}${words}`)),
      make("div", { class: "bar" }, make("i", { style: `width: ${100 * part}%` })));
  });
  const path = trace.critical.filter((i) => trace.end[i] > trace.start[i]);
  const onPath = Object.entries(trace.critical_us).sort((a, b) => b[1] - a[1]).map(([queue, us]) => `${queue} ${share(us, trace.span_us)}`);
  panel(`Forward and backward, ${trace.source}: ${timeText(trace.span_us)}`,
    `As drawn, limited by ${trace.limit}. Of the time: ${onPath.join(", ")}.`, false,
    make("h3", {}, "Queues"), ...busy,
    make("h3", {}, "Memory"), facts(TIERS.map((tier) => [tier, `${bytesText(trace.memory[tier].peak)} of ${limitText(P.tiers[tier].limit)}`])),
    list("Critical path", path, rowOf, 10),
    P.plan ? make("details", {}, make("summary", {}, "The plan"), make("pre", {}, P.plan)) : "",
    make("p", { class: "sub", style: "margin-top: 16px" }, "Click a box or the memory below it. Wheel zooms, dragging moves; ? lists the keys."));
}

function showInstruction(i) {
  const times = shown().flatMap((trace) => trace.missing.has(i) ? [[trace.source, "did not run"]] : [
    [shown().length > 1 ? `${trace.source} start` : "start", timeText(trace.start[i], 6)], ["took", timeText(trace.end[i] - trace.start[i], 4)]]);
  const why = main().path.get(i);
  const reads = I.reads[i], writes = I.writes[i];
  panel(textOf(i), `#${i} · ${I.op[i]} on ${I.queue[i]} · ${I.phase[i]}`, true,
    facts([["block", I.block[i]], ["label", I.label[i]], ["kernel", I.kernel[i]], ...times, ["moves", I.nbytes[i] ? bytesText(I.nbytes[i]) : ""],
      ["workspace", I.workspace[i] ? bytesText(I.workspace[i]) : ""], ["critical", why ? `yes; it starts ${WHY[why]}` : "no"]]),
    list("Waits for", I.deps[i], rowOf), list("Waits for, of the previous step", I.previous_step_deps[i], rowOf),
    list("Waited for by", NEEDED[i], rowOf),
    list("Reads", reads, valueRow), list(isWork(i) ? "Writes" : "Of", writes, valueRow));
}

function showValue(value) {
  const buffers = [...B.name.keys()].filter((b) => B.value[b] === value);
  const places = buffers.map((b) => `${B.tier[b]} (${B.kind[b]})`);
  panel(called(value), `${B.role[buffers[0]]} · ${bytesText(B.nbytes[buffers[0]])} · ${[...new Set(places)].join(", ")}`, true,
    facts([["name", V.alias[value] ? V.name[value] : ""]]),
    V.made[value].length ? "" : make("p", { class: "sub", style: "margin-top: 8px" }, "There before the step; nothing makes it."),
    list("Made by", V.made[value], rowOf), list("Moved by", V.moved[value], rowOf), list("Used by", V.used[value], rowOf, 20),
    list("Freed by", V.freed[value], rowOf));
}

// What a tier holds at a moment, the largest first.
function heldAt(tier, us, series) {
  const trace = main(), [place, role] = series ?? [];
  const kind = { slot: "placed", pooled: "pooled" }[place];
  const there = [...B.name.keys()].filter((b) => B.tier[b] === tier && ALLOC[b] >= 0 && trace.start[ALLOC[b]] <= us &&
    (FREE[b] < 0 || trace.start[FREE[b]] > us) && (!series || (B.kind[b] === kind && B.role[b] === role)));
  return there.sort((a, b) => B.nbytes[b] - B.nbytes[a]);
}

const wordsOf = ([place, role]) => (place === "slot" || place === "pooled" ? `${role}, ${PLACES[place]}` : PAINTS[place][2]);
const stackAt = (held, us) => held.series.map((series, s) => [series, held.rows[after(held.time, us) * held.width + s], held.colours[s]]).filter((each) => each[1]).reverse();

function showMoment({ tier, us, series }) {
  const held = main().memory[tier];
  panel(`${tier} at ${timeText(us, 5)}`, `${bytesText(held.total[after(held.time, us)])} held`, true,
    list("In all", stackAt(held, us), ([pair, nbytes, colour]) => row(colour, wordsOf(pair), bytesText(nbytes), () => select("moment", 0, { tier, us, series: pair })), 20),
    list(series ? `Values: ${wordsOf(series)}` : "Values", heldAt(tier, us, series), valueRow, 30));
}

function showLegend() {
  const used = new Set([...I.paint.filter((_, i) => isWork(i)).map(paintOf), ...shown().flatMap((trace) => TIERS.flatMap((tier) => trace.memory[tier].colours)), ...shown().filter(updateOf).map(() => "update")]);
  if (used.has("state") && used.has("update")) used.delete("state");
  const slots = shown().some((trace) => TIERS.some((tier) => trace.memory[tier].series.some((pair) => pair[0] === "slot")));
  const words = (paint) => (paint === "update" && (P.update_us || I.paint.includes("update")) ? "updates, optimizer state" : PAINTS[paint][2]);
  const marks = Object.keys(PAINTS).filter((paint) => used.has(paint)).map((paint) => make("span", {}, swatch(paint), words(paint)));
  const striped = make("i", { class: "swatch striped", style: "background-color: var(--grey)" });
  byId("legend").replaceChildren(...marks, slots ? make("span", {}, striped, "in memory: a slot of the arena") : "",
    mt.critical ? make("span", {}, make("i", { class: "swatch path" }), "critical path") : "",
    shown().length > 1 ? make("span", {}, "P predicted, M measured; in memory the line is measured") : "");
}

function tip(lines, x, y) {
  const box = byId("tip");
  box.hidden = !lines;
  if (!lines) return;
  box.replaceChildren(...lines);
  const w = box.offsetWidth, h = box.offsetHeight;
  box.style.left = `${x + 14 + w > innerWidth ? Math.max(4, x - w - 12) : x + 14}px`;
  box.style.top = `${y + 16 + h > innerHeight ? Math.max(4, y - h - 10) : y + 16}px`;
}

function tipOfInstruction(i) {
  const lines = [make("b", {}, textOf(i)), make("div", { class: "sub" }, `#${i} · ${I.queue[i]} · ${I.phase[i]}${I.label[i] ? ` · ${I.label[i]}` : ""}`)];
  for (const trace of shown()) {
    if (isWork(i) && !trace.missing.has(i)) lines.push(make("div", {}, `${trace.source}: ${spent(i, trace)} from ${timeText(trace.start[i], 5)}`));
  }
  const more = [I.nbytes[i] ? `moves ${bytesText(I.nbytes[i])}` : "", I.workspace[i] ? `workspace ${bytesText(I.workspace[i])}` : "",
    I.deps[i].length ? `waits for ${I.deps[i].map((dep) => `#${dep}`).join(", ")}` : ""].filter(Boolean);
  if (!isWork(i)) more.push(bytesText(B.nbytes[I.writes[i][0]]));
  return more.length ? [...lines, make("div", {}, more.join(" · "))] : lines;
}

function tipOfMoment(tier, us) {
  const held = main().memory[tier], total = held.total[after(held.time, us)], { limit } = P.tiers[tier];
  const rows = stackAt(held, us).map(([pair, nbytes, colour]) => make("tr", {}, make("td", {}, swatch(colour)), make("td", {}, wordsOf(pair)), make("td", {}, bytesText(nbytes))));
  return [make("b", {}, `${tier}: ${bytesText(total)}`), make("div", { class: "sub" }, `at ${timeText(us, 5)}${
    limit === null ? "" : `, ${bytesText(limit - total)} of the budget left`}`), make("table", {}, ...rows)];
}

function table(caption, head, body) {
  return make("table", {}, make("caption", {}, caption), make("thead", {}, make("tr", {}, ...head.map((text) => make("th", { scope: "col" }, text)))),
    make("tbody", {}, ...body.map((cells) => make("tr", {}, ...cells.map((text, k) => make("td", { class: k === cells.length - 1 ? "wide" : undefined }, `${text}`))))));
}

const PAGE = 500; // rows; all of a large schedule at once would be slow
function showTables(from = 0) {
  const trace = main(), dialog = byId("tables");
  const work = [...Array(COUNT).keys()].filter(isWork);
  const turn = (to, words) => make("button", { onclick: () => showTables(to), ...(to < 0 || to >= work.length ? { disabled: "" } : {}) }, words);
  dialog.replaceChildren(
    make("div", { class: "head" }, make("h2", {}, byId("summary").textContent), make("button", { onclick: () => dialog.close() }, "Close")),
    table(`Queues, ${trace.source}`, ["queue", "busy", "of the step", "on the critical path"], P.queues.map((queue) => [queue, timeText(trace.busy_us[queue] ?? 0, 5),
      share(trace.busy_us[queue] ?? 0, trace.span_us), timeText(trace.critical_us[queue] ?? 0, 5)])),
    table("Memory", ["tier", "peak", "planned peak", "budget"], TIERS.map((tier) => [tier, bytesText(trace.memory[tier].peak), bytesText(P.tiers[tier].peak),
      limitText(P.tiers[tier].limit)])),
    table(`Copies and kernels, ${from + 1} to ${Math.min(from + PAGE, work.length)} of ${work.length}`, ["#", "queue", "phase", "start", "took", "waits for", "critical", "what"],
      work.slice(from, from + PAGE).map((i) => [i, I.queue[i], I.phase[i], timeText(trace.start[i], 6), spent(i), I.deps[i].map((dep) => `#${dep}`).join(" "),
        trace.path.has(i) ? "yes" : "", textOf(i)])),
    make("div", { class: "head", style: "margin-top: 10px" }, turn(from - PAGE, "Earlier"), turn(from + PAGE, "Later")));
  if (!dialog.open) dialog.showModal();
}

const KEYS = [["+ −", "zoom in and out (or the wheel)"], ["← →", "move (or drag); with Shift, by a whole view"], ["0", "show the whole step"], ["/", "search; Enter: the next match"],
  ["n p", "the next and previous instruction of the queue"], ["Enter", "zoom to what is selected"], ["m", "predicted, measured, or both"], ["c", "mark the critical path"],
  ["a", "everything as tables"], ["t", "light or dark"], ["Esc", "close, clear"], ["?", "this list"]];

function showKeys() {
  const dialog = byId("keys");
  dialog.replaceChildren(make("div", { class: "head" }, make("h2", {}, "Keys"), make("button", { onclick: () => dialog.close() }, "Close")),
    make("dl", {}, ...KEYS.flatMap(([keys, words]) => [make("dt", {}, ...keys.split(" ").flatMap((key) => [make("kbd", {}, key), " "])), make("dd", {}, words)])));
  dialog.showModal();
}
