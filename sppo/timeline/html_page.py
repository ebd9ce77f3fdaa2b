"""Template of the page of `timeline.html`: markup, style and script, with title and data left open.

The script draws one canvas per schedule, and only the visible bars, so that zooming stays fast with
a few hundred thousand bars.
"""

PAGE = r"""<!DOCTYPE html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>{{TITLE}}</title>
<style>
  :root { color-scheme: light; }
  body { margin: 0; color: #222; background: #fff;
         font: 14px/1.4 system-ui, "Segoe UI", "DejaVu Sans", sans-serif; }
  header { position: sticky; top: 0; background: #fff; border-bottom: 1px solid #ddd;
           padding: 8px 16px; z-index: 2; }
  h1 { font-size: 15px; margin: 0 12px 0 0; display: inline-block; }
  #legend { display: inline-flex; flex-wrap: wrap; gap: 4px 16px; vertical-align: middle; }
  #legend span { white-space: nowrap; }
  #legend i { display: inline-block; width: 14px; height: 12px; margin-right: 5px;
              vertical-align: -1px; }
  #help { color: #666; font-size: 12px; margin-top: 2px; }
  button { font: inherit; font-size: 12px; margin-left: 8px; padding: 1px 8px; cursor: pointer; }
  section { padding: 10px 16px 2px; }
  h2 { font-size: 13px; font-weight: 600; margin: 0 0 4px; }
  canvas { display: block; width: 100%; cursor: grab; touch-action: none; }
  canvas.dragging { cursor: grabbing; }
  #tip { position: fixed; display: none; pointer-events: none; background: #222; color: #fff;
         padding: 5px 9px; border-radius: 4px; font-size: 12px; white-space: pre; z-index: 3;
         max-width: 60ch; }
</style>
</head>
<body>
<header>
  <h1>{{TITLE}}</h1><div id="legend"></div>
  <div id="help">wheel: zoom · drag: move · point at a bar: what it is
    <button id="all">show all</button></div>
</header>
<main></main>
<div id="tip"></div>
<script type="application/json" id="data">{{DATA}}</script>
<script>
"use strict";
const data = JSON.parse(document.getElementById("data").textContent);
const LEFT = 78, RIGHT = 10, AXIS = 20, MEMORY = 86, LEGEND = 14;
const end = Math.max(...data.panels.map(p => p.makespan), 1e-30);
let from = 0, to = end * 1.005, redraw = 0;
const tip = document.getElementById("tip");
const isFar = v => Math.abs(v) >= 1e5 || (v !== 0 && Math.abs(v) < 1e-3);
const number = v => isFar(v) ? v.toExponential(3) : String(+v.toPrecision(5));
const time = v => data.abstract ? number(v) : number(v) + " s";
function size(v) {
  if (data.abstract) return number(v);
  const power = Math.min(4, Math.max(0, Math.floor(Math.log2(Math.max(v, 1)) / 10)));
  return +(v / 2 ** (10 * power)).toPrecision(3) + " " + ["B", "KiB", "MiB", "GiB", "TiB"][power];
}

// "0B2.1[1/3]" as text; what is of no sequence is left as it is.
function asText(code) {
  const m = /^(\d+)[A-Z_0-9]*?[A-Z](\d+)\.(\d+)(?:\[(\d+)\/(\d+)\])?$/.exec(code);
  if (!m) return code;
  const shard = m[4] === undefined ? "" : `, shard ${+m[4] + 1} of ${m[5]}`;
  return `of stage ${m[1]}, sequence ${m[2]}, subsequence ${m[3]}${shard} (${code})`;
}

// Bars of a row are sorted by lane and time, so that the visible ones are found by bisection.
const panels = data.panels.map(panel => {
  const hasCopies = panel.rows.some(r => r.bars.some(b => b[2] === 1 || b[2] === 2));
  const hasLinks = panel.rows.some(r => r.bars.some(b => b[2] === 3));
  const height = Math.max(8, Math.min(38, 900 / panel.rows.length));
  const rows = panel.rows.map(row => {
    const lanes = [[], [], [], [], []];
    for (const bar of row.bars) lanes[bar[2]].push(bar);
    for (const lane of lanes) lane.sort((a, b) => a[0] - b[0]);
    return { rank: row.rank, lanes, idle: row.idle, memory: row.memory };
  });
  const most = row => row.memory.reduce((m, point) => Math.max(m, point[1]), 0);
  const peak = Math.max(0, ...rows.map(most));
  const section = document.createElement("section");
  const heading = document.createElement("h2");
  heading.textContent = panel.title;
  const canvas = document.createElement("canvas");
  section.append(heading, canvas);
  document.querySelector("main").append(section);
  const below = peak > 0 ? MEMORY : 0;
  const total = rows.length * height + AXIS + below;
  return { panel, rows, canvas, height, hasCopies, hasLinks, peak, below, total };
});

// Where a lane lies inside its row, as fractions of the row's height.
function place(view, lane) {
  const extra = (view.hasCopies ? 2 : 0) + (view.hasLinks ? 1 : 0);
  const main = extra ? 0.92 - 0.13 * extra : 0.9;
  if (lane === 0) return [0.04, main - 0.04];
  if (lane === 1) return [main + 0.02, 0.11];
  if (lane === 2) return [main + 0.15, 0.11];
  if (lane === 3) return [main + (view.hasCopies ? 0.28 : 0.02), 0.11];
  return null;
}

function firstVisible(bars, time) {
  let low = 0, high = bars.length;
  while (low < high) {
    const mid = (low + high) >> 1;
    if (bars[mid][1] < time) low = mid + 1; else high = mid;
  }
  return low;
}

function ticks() {
  const rough = (to - from) / 10, power = Math.pow(10, Math.floor(Math.log10(rough)));
  const step = [1, 2, 5, 10].map(f => f * power).find(s => s >= rough);
  const out = [];
  for (let k = Math.ceil(from / step); k * step <= to; k++) out.push(k * step);
  return out;
}

const DARK = new Set(["#8FB4D9", "#7BBF87", "#D9CC7A", "#D08BB4", "#66CCEE"]);

function draw(view) {
  const ratio = window.devicePixelRatio || 1, width = view.canvas.clientWidth;
  view.canvas.style.height = view.total + "px";
  view.canvas.width = width * ratio;
  view.canvas.height = view.total * ratio;
  const g = view.canvas.getContext("2d");
  g.scale(ratio, ratio);
  const inner = width - LEFT - RIGHT;
  const x = t => LEFT + (t - from) / (to - from) * inner;
  g.textBaseline = "middle";
  view.rows.forEach((row, n) => drawRow(g, view, row, n * view.height, x, inner));
  g.fillStyle = "#fff";
  g.fillRect(0, 0, LEFT, view.total);
  g.fillStyle = "#222";
  g.textAlign = "right";
  g.font = "12px sans-serif";
  const every = Math.ceil(14 / view.height), [above, high] = place(view, 0);
  const middle = above + high / 2;
  view.rows.forEach((row, n) => {
    if (n % every === 0) g.fillText("rank " + row.rank, LEFT - 8, (n + middle) * view.height);
  });
  drawEnd(g, view, x, width);
  drawAxis(g, view, x, width);
  if (view.below) drawMemory(g, view, x, width);
}

function drawRow(g, view, row, top, x, inner) {
  const [a, h] = place(view, 0), pixel = (to - from) / inner;
  for (let k = firstVisible(row.idle, from); k < row.idle.length && row.idle[k][0] < to; k++) {
    const [start, stop, cause] = row.idle[k];
    g.fillStyle = data.idle[cause].colour;
    const w = Math.max(0.5, x(stop) - x(start));
    g.fillRect(x(start), top + a * view.height, w, h * view.height);
  }
  row.lanes.forEach((bars, lane) => {
    const where = place(view, lane);
    if (!where) return;
    let drawnTo = -1;
    for (let k = firstVisible(bars, from); k < bars.length && bars[k][0] < to; k++) {
      const bar = bars[k];
      if (bar[1] - bar[0] < pixel && bar[1] < drawnTo + pixel) continue;
      drawnTo = bar[1];
      drawBar(g, view, bar, top, where, x);
    }
  });
}

function drawBar(g, view, bar, top, where, x) {
  const x0 = Math.max(LEFT, x(bar[0])), x1 = Math.min(x(bar[1]), view.canvas.clientWidth - RIGHT);
  const y = top + where[0] * view.height, h = where[1] * view.height;
  const colour = view.panel.styles[bar[3]].colour, w = x1 - x0;
  g.fillStyle = colour;
  g.fillRect(x0, y, Math.max(0.5, w - (w > 4 ? 1 : 0)), h);
  if (!bar[4] || h < 9 || w < 8) return;
  const label = bar[5].includes("[") && w > 70 ? bar[5] : bar[4];
  g.font = "12px sans-serif";
  const size = Math.min(12, h * 0.7, 12 * (w - 3) / g.measureText(label).width);
  if (size < 7) return;
  g.font = size + "px sans-serif";
  g.fillStyle = DARK.has(colour) ? "#000" : "#fff";
  g.textAlign = "center";
  g.fillText(label, (x0 + x1) / 2, y + h / 2 + 0.5);
}

// Panels share one time axis: one that ends before the others says so.
function drawEnd(g, view, x, width) {
  const start = Math.max(LEFT, x(view.panel.makespan)), room = width - RIGHT - start;
  if (room < 1) return;
  g.fillStyle = "#fafafa";
  g.fillRect(start, 0, room, view.rows.length * view.height);
  const text = "ended at " + time(view.panel.makespan);
  g.font = "12px sans-serif";
  if (room < g.measureText(text).width + 12) return;
  g.fillStyle = "#888";
  g.textAlign = "left";
  g.fillText(text, start + 6, view.rows.length * view.height / 2);
}

function drawAxis(g, view, x, width) {
  const y = view.rows.length * view.height;
  g.strokeStyle = "#999";
  g.fillStyle = "#444";
  g.font = "11px sans-serif";
  g.textAlign = "center";
  g.beginPath();
  g.moveTo(LEFT, y + 0.5);
  g.lineTo(width - RIGHT, y + 0.5);
  for (const t of ticks()) {
    g.moveTo(x(t), y);
    g.lineTo(x(t), y + 4);
    g.fillText(time(t), x(t), y + 12);
  }
  g.stroke();
}

function drawMemory(g, view, x, width) {
  const top = view.rows.length * view.height + AXIS + LEGEND, h = view.below - LEGEND - 8;
  const y = v => top + h - v / view.peak * (h - 4);
  g.save();
  g.beginPath();
  g.rect(LEFT, top, width - LEFT - RIGHT, h + 2);
  g.clip();
  const step = Math.max(1, Math.ceil(view.rows.length / 16));
  const colour = n => `hsl(${260 - 220 * n / Math.max(1, view.rows.length - 1)} 70% 42%)`;
  for (let n = 0; n < view.rows.length; n += step) {
    g.strokeStyle = colour(n);
    g.lineWidth = 1.2;
    g.beginPath();
    g.moveTo(x(0), y(0));
    let value = 0;
    for (const [time, next] of view.rows[n].memory) {
      g.lineTo(x(time), y(value));
      g.lineTo(x(time), y(next));
      value = next;
    }
    g.lineTo(x(view.panel.makespan), y(value));
    g.stroke();
  }
  g.restore();
  g.font = "11px sans-serif";
  g.textAlign = "left";
  let right = LEFT + 4;
  for (let n = 0; n < view.rows.length; n += step) {
    g.fillStyle = colour(n);
    g.fillText("rank " + view.rows[n].rank, right, top - LEGEND / 2 + 1);
    right += 56;
  }
  g.fillStyle = "#444";
  g.textAlign = "right";
  g.fillText("memory", LEFT - 8, top + h / 2);
  g.fillText(size(view.peak), LEFT - 8, y(view.peak) + 3);
  g.fillText("0", LEFT - 8, y(0) - 3);
}

function drawAll() {
  if (redraw) return;
  redraw = requestAnimationFrame(() => { redraw = 0; panels.forEach(draw); });
}

function timeAt(view, event) {
  const box = view.canvas.getBoundingClientRect();
  return from + (event.clientX - box.left - LEFT) / (box.width - LEFT - RIGHT) * (to - from);
}

function move(a, b) {
  const span = Math.min(Math.max(b - a, end * 1e-7), end * 1.2);
  from = Math.max(-end * 0.1, Math.min(a, end * 1.1 - span));
  to = from + span;
  drawAll();
}

const lasting = (verb, a, b) => `${time(a)} to ${time(b)}, ${verb} ${time(b - a)}`;

function memoryAt(view, when) {
  if (when < 0 || when > view.panel.makespan) return null;
  const lines = [];
  for (let n = 0; n < view.rows.length; n += Math.max(1, Math.ceil(view.rows.length / 16))) {
    let value = 0;
    for (const [at, next] of view.rows[n].memory) { if (at > when) break; value = next; }
    lines.push(`rank ${view.rows[n].rank}: ${size(value)}`);
  }
  return `memory at ${time(when)}\n` + lines.join("\n");
}

function pointed(view, event) {
  const box = view.canvas.getBoundingClientRect(), py = event.clientY - box.top;
  const when = timeAt(view, event);
  const row = view.rows[Math.floor(py / view.height)];
  if (view.below && py > view.total - view.below) return memoryAt(view, when);
  if (!row || event.clientX - box.left < LEFT) return null;
  const share = py / view.height % 1;
  for (let lane = 0; lane < 5; lane++) {
    const where = place(view, lane);
    if (!where || share < where[0] || share > where[0] + where[1]) continue;
    const bars = row.lanes[lane], bar = bars[firstVisible(bars, when)];
    if (bar && bar[0] <= when) {
      const what = `${view.panel.styles[bar[3]].name} ${asText(bar[5])}`;
      return what + "\n" + lasting("takes", bar[0], bar[1]);
    }
  }
  const gap = row.idle[firstVisible(row.idle, when)];
  if (gap && gap[0] <= when) {
    return `${data.idle[gap[2]].name}\n` + lasting("lasts", gap[0], gap[1]);
  }
  return null;
}

for (const view of panels) {
  const canvas = view.canvas;
  let grabbed = null;
  canvas.addEventListener("wheel", event => {
    event.preventDefault();
    const at = timeAt(view, event), factor = Math.exp(event.deltaY * 0.0015);
    move(at - (at - from) * factor, at + (to - at) * factor);
  }, { passive: false });
  canvas.addEventListener("pointerdown", event => {
    grabbed = { x: event.clientX, from, to };
    canvas.setPointerCapture(event.pointerId);
    canvas.classList.add("dragging");
  });
  canvas.addEventListener("pointerup", () => {
    grabbed = null;
    canvas.classList.remove("dragging");
  });
  canvas.addEventListener("pointerleave", () => { tip.style.display = "none"; });
  canvas.addEventListener("pointermove", event => {
    if (grabbed) {
      const share = (grabbed.x - event.clientX) / (canvas.clientWidth - LEFT - RIGHT);
      const shift = share * (grabbed.to - grabbed.from);
      move(grabbed.from + shift, grabbed.to + shift);
      return;
    }
    const text = pointed(view, event);
    tip.style.display = text ? "block" : "none";
    if (!text) return;
    tip.textContent = text;
    tip.style.left = Math.min(event.clientX + 14, innerWidth - tip.offsetWidth - 8) + "px";
    tip.style.top = Math.min(event.clientY + 16, innerHeight - tip.offsetHeight - 8) + "px";
  });
}

const legend = document.getElementById("legend"), listed = new Set();
function list(colour, name) {
  if (listed.has(name)) return;
  listed.add(name);
  const item = document.createElement("span"), patch = document.createElement("i");
  patch.style.background = colour;
  item.append(patch, name);
  legend.append(item);
}
const styles = panels.flatMap(p => p.panel.styles).sort((a, b) => a.order - b.order);
for (const style of styles) list(style.colour, style.name);
const causes = new Set(data.panels.flatMap(p => p.rows.flatMap(r => r.idle.map(i => i[2]))));
data.idle.forEach((cause, n) => { if (causes.has(n)) list(cause.colour, cause.name); });
document.getElementById("all").addEventListener("click", () => move(0, end * 1.005));
addEventListener("resize", drawAll);
drawAll();
</script>
</body>
</html>
"""
