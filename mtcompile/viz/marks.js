// What lies over the lanes and the memory: the selection, and the overview of the whole step.

function drawSelected() {
  if (mt.selected.kind === "value") return drawLives(mt.selected.index);
  const i = mt.selected.index;
  for (const trace of shown()) {
    const to = boxOf(trace, i);
    for (const dep of I.deps[i]) arrow(boxOf(trace, dep), to, C.strong, []);
    for (const next of NEEDED[i].slice(0, 60)) arrow(to, boxOf(trace, next), C.faint, [4, 3]);
    ctx.strokeStyle = C.strong;
    ctx.lineWidth = 2;
    ctx.strokeRect(to.x0 - 1, to.y - 1, Math.max(3, to.x1 - to.x0 + 1), to.h + 2);
    ctx.lineWidth = 1;
  }
}

function boxOf(trace, i) {
  const row = rows.find((each) => each.queue === I.queue[i]), { y, h } = band(row, trace);
  return { x0: xOf(trace.start[i]), x1: xOf(trace.end[i]), y, h };
}

function arrow(from, to, colour, dash) {
  const y0 = from.y + from.h / 2, y1 = to.y + to.h / 2, bend = Math.max(14, Math.min(70, Math.abs(to.x0 - from.x1) / 2));
  ctx.strokeStyle = ctx.fillStyle = colour;
  ctx.setLineDash(dash);
  ctx.lineWidth = 1.6;
  ctx.beginPath();
  ctx.moveTo(from.x1, y0);
  ctx.bezierCurveTo(from.x1 + bend, y0, to.x0 - bend, y1, to.x0, y1);
  ctx.stroke();
  ctx.setLineDash([]);
  ctx.lineWidth = 1;
  ctx.beginPath();
  ctx.moveTo(to.x0, y1);
  ctx.lineTo(to.x0 - 8, y1 - 4);
  ctx.lineTo(to.x0 - 8, y1 + 4);
  ctx.fill();
}

// A bar per buffer that holds the value, in its tier, from alloc to free.
function drawLives(value) {
  const used = {};
  B.value.forEach((other, b) => {
    const row = rows.find((each) => each.tier === B.tier[b]);
    if (other !== value || !row) return;
    const trace = main(), x0 = ALLOC[b] < 0 ? GUTTER : xOf(trace.start[ALLOC[b]]), x1 = FREE[b] < 0 ? width : xOf(trace.start[FREE[b]]);
    const y = row.y + row.h - 13 - 13 * (used[row.tier] = (used[row.tier] ?? -1) + 1);
    rect(C.paper, x0 - 1, y - 1, Math.max(5, x1 - x0 + 2), 12);
    rect(C.strong, x0, y, Math.max(3, x1 - x0), 10);
    ctx.font = FONT;
    const words = [`${called(value)} (${B.kind[b]})`, called(value)].find((each) => ctx.measureText(each).width < x1 - Math.max(x0, GUTTER) - 8);
    if (words) put(words, Math.max(x0, GUTTER) + 4, y + 5.5, C.paper);
  });
}

// --------------------------------------------------------------------------------------------------------- the overview

function drawOverview() {
  const trace = main(), scale = window.devicePixelRatio || 1;
  if (!overview || small !== trace) {
    small = trace;
    overview = document.createElement("canvas");
    overview.width = canvas.width;
    overview.height = OVERVIEW * scale;
    const o = overview.getContext("2d");
    o.scale(scale, scale);
    const h = (OVERVIEW - 8) / P.queues.length, per = plotWidth() / END;
    trace.lanes.forEach((lane, k) => lane.boxes.forEach((i, n) => {
      o.fillStyle = C[PAINTS[paintOf(I.paint[i])][0]];
      o.fillRect(GUTTER + lane.start[n] * per, 4 + k * h, Math.max(0.5, (lane.end[n] - lane.start[n]) * per), Math.max(1, h - 1));
    }));
  }
  rect(C.paper, 0, 0, width, OVERVIEW);
  ctx.drawImage(overview, 0, 0, width, OVERVIEW);
  put("whole step", 14, OVERVIEW / 2, C.faint);
  const per = plotWidth() / END, x0 = GUTTER + mt.view[0] * per, x1 = GUTTER + mt.view[1] * per;
  ctx.globalAlpha = 0.72;
  rect(C.paper, GUTTER, 0, x0 - GUTTER, OVERVIEW);
  ctx.fillRect(x1, 0, width - x1, OVERVIEW);
  ctx.globalAlpha = 1;
  ctx.strokeStyle = C.accent;
  ctx.lineWidth = 1.5;
  ctx.strokeRect(x0, 1.5, Math.max(3, x1 - x0), OVERVIEW - 3);
  ctx.lineWidth = 1;
  rect(C.line, 0, OVERVIEW, width, 1);
}
