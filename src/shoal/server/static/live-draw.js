// Drawing on canvases: lanes, passes, KV blocks and the overview. Owns pixels and what lies under the mouse; is given a
// model and a view (which seconds are shown) and changes neither.

import {DECODE, PROMPT, lastAt} from "./live-model.js";

const FONT = "system-ui, -apple-system, 'Segoe UI', Roboto, 'Helvetica Neue', sans-serif";
const AXIS = 22, BAND = 8, LONGEST_LINE = 40;
const NAMES = ["paper", "ink", "soft", "line", "head", "stripe", "prompt", "decode", "again", "swap", "cached", "accepted",
  "padding", "wait", "held", "shared", "free", "pick"];

// the colours of the page's style, as the current theme has them
export function palette() {
  const style = getComputedStyle(document.documentElement);
  return Object.fromEntries(NAMES.map((name) => [name, style.getPropertyValue(`--${name}`).trim()]));
}

// a context whose unit is a CSS pixel
export function prepare(canvas) {
  const ratio = window.devicePixelRatio || 1, {clientWidth: width, clientHeight: height} = canvas;
  if (canvas.width !== Math.round(width * ratio) || canvas.height !== Math.round(height * ratio)) {
    canvas.width = Math.round(width * ratio);
    canvas.height = Math.round(height * ratio);
  }
  const context = canvas.getContext("2d");
  context.setTransform(ratio, 0, 0, ratio, 0, 0);
  context.clearRect(0, 0, width, height);
  return {context, width, height};
}

function write(context, text, x, y, colour, {size = 11, align = "left", weight = 400, most} = {}) {
  context.font = `${weight} ${size}px ${FONT}`;
  context.fillStyle = colour;
  context.textAlign = align;
  context.textBaseline = "middle";
  if (most !== undefined && context.measureText(text).width > most) {
    while (text.length > 1 && context.measureText(text + "…").width > most) text = text.slice(0, -1);
    text += "…";
  }
  context.fillText(text, x, y);
}

export function clock(seconds) {
  const whole = Math.max(0, seconds), minutes = Math.floor(whole / 60);
  const rest = whole - 60 * minutes;
  return `${minutes}:${String(Math.floor(rest)).padStart(2, "0")}`;
}

// ---- where things are

// the part of the time that is shown: view = {edge, span}; x counts from the left of the plot
export function scaleOf(view, left, width) {
  const perSecond = (width - left) / view.span, from = view.edge - view.span;
  return {perSecond, from, x: (t) => left + (t - from) * perSecond, t: (x) => from + (x - left) / perSecond};
}

// the parts of a slot lie one after the other, so that those of a time are found without looking at all of them
function firstSeen(parts, from) {
  let low = 0, high = parts.length;
  while (low < high) {
    const middle = (low + high) >> 1;
    if (parts[middle].b < from) low = middle + 1; else high = middle;
  }
  return low;
}

function seenIn(parts, from, edge, shows) {
  for (let at = firstSeen(parts, from); at < parts.length && parts[at].a <= edge; at += 1) {
    if (shows(parts[at].lane)) return true;
  }
  return false;
}

// which rows are shown: a band of slots for each engine
export function layOut(model, view, width, height, shows) {
  const from = view.edge - view.span, bands = [];
  let rows = 0;
  for (const engine of [...model.engines.values()].sort((a, b) => a.number - b.number)) {
    const slots = [], places = new Map();
    engine.slots.forEach((parts, slot) => {
      if (!seenIn(parts, from, view.edge, shows)) return;
      places.set(slot, slots.length);
      slots.push(slot);
    });
    bands.push({engine, slots, places});
    rows += Math.max(slots.length, bands.length > 1 || model.engines.size > 1 ? 2 : 1);
  }
  const many = bands.length > 1;
  const room = height - AXIS - (many ? BAND * bands.length : 0) - 6;
  const step = Math.min(22, room / Math.max(rows, 1));
  const left = width < 620 ? (many ? 26 : 6) : step >= 12 ? 132 : many ? 72 : 12;
  let y = AXIS;
  for (const band of bands) {
    y += many ? BAND : 0;
    band.y = y;
    band.height = Math.max(band.slots.length, many ? 2 : 1) * step;
    y += band.height;
  }
  return {bands, step, left, bottom: y};
}

export function partAt(layout, scale, x, y, shows) {
  for (const band of layout.bands) {
    const slot = band.slots[Math.floor((y - band.y) / layout.step)];
    if (y < band.y || slot === undefined || y > band.y + band.height) continue;
    const t = scale.t(x), parts = band.engine.slots[slot], near = 4 / scale.perSecond;
    for (let at = lastAt(parts, t + near, (part) => part.a); at >= 0 && parts[at].b >= t - near; at -= 1) {
      if (shows(parts[at].lane)) return parts[at];
    }
    return null;
  }
  return null;
}

// ---- lanes

export function drawLanes(canvas, model, view, colours, shows, picked, hovered) {
  const {context, width, height} = prepare(canvas);
  const layout = layOut(model, view, width, height, shows), scale = scaleOf(view, layout.left, width);
  drawTimes(context, view, scale, layout, width, height, colours);
  context.save();
  context.beginPath();
  context.rect(layout.left, 0, width - layout.left, height);
  context.clip();
  for (const band of layout.bands) drawOutages(context, band, view, scale, colours);
  const thick = layout.step > 5 ? layout.step - Math.min(4, layout.step * 0.28) : Math.max(layout.step, 0.6);
  for (const band of layout.bands) {
    const ink = new Ink(context, model, view, scale, layout.step, thick, colours, picked, hovered);
    let lastY = -1;
    band.slots.forEach((slot, row) => {
      const y = band.y + row * layout.step, parts = band.engine.slots[slot];
      ink.shared = layout.step < 1 && Math.round(y) === lastY;  // a line of pixels that a lane has drawn its decodes on
      lastY = Math.round(y);
      for (let at = firstSeen(parts, scale.from); at < parts.length && parts[at].a <= view.edge; at += 1) {
        if (shows(parts[at].lane)) ink.part(parts[at], y);
      }
    });
    ink.draw();
    drawBoundaries(context, band, view, scale, colours);
  }
  drawJumps(context, model, layout, view, scale, colours, shows);
  for (const band of layout.bands) drawOutageNotes(context, band, view, scale, colours, model.engines.size > 1);
  context.restore();
  drawLabels(context, layout, view, scale, colours, shows, width, picked, model);
  return {layout, scale};
}

function drawTimes(context, view, scale, layout, width, height, colours) {
  const step = [0.1, 0.2, 0.5, 1, 2, 5, 10, 20, 30, 60, 120, 300].find((one) => one * scale.perSecond >= 64) ?? 600;
  context.lineWidth = 1;
  for (let t = Math.ceil(scale.from / step) * step; t <= view.edge; t += step) {
    const x = Math.round(scale.x(t)) + 0.5;
    context.strokeStyle = colours.line;
    context.globalAlpha = 0.6;
    context.beginPath();
    context.moveTo(x, AXIS - 4);
    context.lineTo(x, height);
    context.stroke();
    context.globalAlpha = 1;
    if (t >= 0 && x > layout.left + 14 && x < width - 18) {
      write(context, step < 1 ? `${t.toFixed(1)} s` : clock(t), x, 9, colours.soft, {align: "center"});
    }
  }
}

function drawOutages(context, band, view, scale, colours) {
  for (const one of band.engine.outages) {
    const from = scale.x(one.a), to = scale.x(Math.min(one.b, view.edge));
    if (to < scale.x(scale.from) || one.a > view.edge) continue;
    context.fillStyle = colours.again;
    context.globalAlpha = 0.1;
    context.fillRect(from, band.y - 2, Math.max(2, to - from), band.height + 4);
    context.globalAlpha = 0.9;
    context.fillRect(from, band.y - 2, 1.5, band.height + 4);
    if (one.b !== Infinity) context.fillRect(to - 1.5, band.y - 2, 1.5, band.height + 4);
    context.globalAlpha = 1;
  }
}

function drawOutageNotes(context, band, view, scale, colours, many) {
  for (const one of band.engine.outages) {
    if (one.b < scale.from || one.a > view.edge) continue;
    const name = many ? `engine ${band.engine.number}` : "engine";
    const text = one.b === Infinity ? `${name} is down` : `${name} was down for ${(one.b - one.a).toFixed(1)} s`;
    const x = Math.max(scale.x(one.a) + 8, scale.x(scale.from) + 8);
    note(context, text, x, band.y + band.height / 2, colours, colours.again);
  }
}

// Rectangles and lines of many lanes, kept by colour: a thousand lanes change the colour a few times, not a thousand.
class Ink {
  constructor(context, model, view, scale, step, thick, colours, picked, hovered) {
    Object.assign(this, {context, model, view, scale, step, thick, colours, picked, hovered});
    this.rects = new Map();  // colour → x, y, width, height, …
    this.lines = [];  // of lanes that wait
    this.later = [];  // what is drawn on top
    this.shared = false;
  }

  // thin lanes lie on whole pixels: a rectangle without soft edges is drawn in a fraction of the time
  rect(colour, x, y, w, h) {
    let kept = this.rects.get(colour);
    if (!kept) this.rects.set(colour, kept = []);
    if (this.step < 5) kept.push(Math.round(x), Math.round(y), Math.max(1, Math.round(w)), Math.max(1, Math.round(h)));
    else kept.push(x, y, w, h);
  }

  part(part, y) {
    const {model, view, scale, step, thick, colours} = this;
    const middle = y + step / 2, top = middle - thick / 2, from = Math.max(part.a, scale.from), end = Math.min(part.b, view.edge);
    const segments = part.segments;
    let at = segments.length < 8 ? 0 : Math.max(0, lastAt(segments, from, (one) => one.a)), drawn = from;
    for (; at < segments.length && segments[at].a <= view.edge; at += 1) {
      const one = segments[at], b = Math.min(model.segmentEnd(part, one), view.edge);
      if (b < from) continue;
      const a = Math.max(one.a, from), x = scale.x(a), w = Math.max(scale.x(b) - x, 0.8);
      if (a > drawn && !this.shared) this.wait(scale.x(drawn), middle, x);
      drawn = Math.max(drawn, b);
      if (this.shared && one.kind === DECODE && part.lane !== this.picked) continue;
      this.rect(one.kind === DECODE ? colours.decode : one.kind === PROMPT ? colours.prompt : colours.again, x, top, w, thick);
      if (one.kind !== DECODE && step >= 13 && w > 34) this.later.push(() => this.count(one, x + w / 2, middle));
    }
    if (end > drawn && !this.shared) this.wait(scale.x(drawn), middle, scale.x(end));
    if (part.waits.length > 1) this.later.push(() => drawWaits(this.context, part, view, scale, middle, end, step, colours));
    if (part.drafts.length && thick >= 4) this.later.push(() => drawDrafts(this.context, part, view, scale, top, thick, colours));
    const first = segments[0];
    if (part.lane.cached && first && step >= 4) {
      const w = Math.min(7, 2 + step / 4);
      this.rect(colours.cached, scale.x(first.a) - w, top, w, thick);
    }
    if (part.b !== Infinity && part.b <= view.edge && part.lane.end === part.b && step >= 6) {
      const ok = part.lane.reason === "stop" || part.lane.reason === "length";
      this.rect(ok ? colours.ink : colours.again, scale.x(part.b) - 0.75, top, 1.5, thick);
    }
    if (part.lane === this.picked || part.lane === this.hovered) this.later.push(() => this.frame(part, scale.x(from), scale.x(end), top));
  }

  // the thin line of a lane that waits; gaps of less than a pixel are none
  wait(x, y, end) {
    if (end - x < 0.5) return;
    const wide = this.step > 4 ? 1.5 : Math.max(0.5, this.step / 3);
    if (this.step < 5) this.lines.push(Math.round(x), Math.round(y - 0.5), Math.round(end) - Math.round(x), 1);
    else this.lines.push(x, y - wide / 2, end - x, wide);
  }

  count(segment, x, middle) {
    write(this.context, segment.n.toLocaleString(), x, middle + 0.5, this.colours.paper, {size: 10, align: "center", weight: 600});
  }

  frame(part, x, end, top) {
    const isPicked = part.lane === this.picked;
    this.context.strokeStyle = isPicked ? this.colours.pick : this.colours.soft;
    this.context.lineWidth = isPicked ? 2 : 1;
    this.context.strokeRect(x - 2, top - 2, end - x + 4, this.thick + 4);
  }

  draw() {
    const {context} = this;
    for (const [colour, rects] of [[this.colours.wait, this.lines], ...this.rects]) {
      context.fillStyle = colour;
      for (let at = 0; at < rects.length; at += 4) context.fillRect(rects[at], rects[at + 1], rects[at + 2], rects[at + 3]);
    }
    for (const one of this.later) one();
  }
}

// a dashed line after a preemption
function drawWaits(context, part, view, scale, middle, end, step, colours) {
  context.lineWidth = step > 4 ? 1.5 : Math.max(0.5, step / 3);
  for (const wait of part.waits) {
    if (!wait.how || wait.how === "move" || wait.a > view.edge) continue;
    const next = part.segments[lastAt(part.segments, wait.a, (one) => one.a) + 1];
    const to = Math.min(next ? next.a : end, view.edge);
    if (to < scale.from) continue;
    context.strokeStyle = wait.how === "swap" ? colours.swap : colours.again;
    context.setLineDash([3, 3]);
    context.beginPath();
    context.moveTo(scale.x(wait.a), middle);
    context.lineTo(scale.x(to), middle);
    context.stroke();
    context.setLineDash([]);
    const size = Math.min(5, step / 2);
    context.fillStyle = context.strokeStyle;
    context.fillRect(scale.x(wait.a) - size / 2, middle - size, size, size * 2);
  }
}

function drawDrafts(context, part, view, scale, top, thick, colours) {
  let at = Math.max(0, lastAt(part.drafts, scale.from, (one) => one.t));
  for (; at < part.drafts.length && part.drafts[at].t <= view.edge; at += 1) {
    const one = part.drafts[at], x = scale.x(one.t), w = Math.max(1, scale.x(one.b) - x);
    const share = one.accepted / one.proposed, h = Math.max(1.5, thick * 0.36);
    context.fillStyle = colours.accepted;
    context.fillRect(x, top, w * share, h);
    context.fillStyle = colours.padding;
    context.fillRect(x + w * share, top, w * (1 - share), h);
  }
}

// where passes begin, once they are far enough apart to be seen
function drawBoundaries(context, band, view, scale, colours) {
  const passes = band.engine.passes;
  let at = Math.max(0, lastAt(passes, scale.from, (one) => one.b));
  const last = lastAt(passes, view.edge, (one) => one.b);
  if (last - at > (view.span * scale.perSecond) / 9) return;
  context.fillStyle = colours.paper;
  context.globalAlpha = 0.55;
  for (; at <= last; at += 1) context.fillRect(scale.x(passes[at].a) - 0.5, band.y, 1, band.height);
  context.globalAlpha = 1;
}

// lanes that went from one engine to another
function drawJumps(context, model, layout, view, scale, colours, shows) {
  if (layout.bands.length < 2) return;
  const place = (part) => {
    const band = layout.bands.find((one) => one.engine.number === part.engine), row = band.places.get(part.slot);
    return row === undefined ? null : band.y + (row + 0.5) * layout.step;
  };
  const jumps = [];
  for (const lane of model.moved) {
    if (!shows(lane)) continue;
    for (let n = 1; n < lane.parts.length; n += 1) {
      const [before, after] = [lane.parts[n - 1], lane.parts[n]];
      if (after.a < scale.from || after.a > view.edge) continue;
      const [y0, y1] = [place(before), place(after)];
      if (y0 !== null && y1 !== null) jumps.push([scale.x(after.a), y0, y1]);
    }
  }
  context.strokeStyle = colours.pick;
  context.lineWidth = 1;
  context.globalAlpha = Math.min(1, Math.max(0.15, 30 / jumps.length));  // where every request moves, lanes are seen through them
  for (const [x, y0, y1] of jumps) {
    context.beginPath();
    context.moveTo(x - 8, y0);
    context.bezierCurveTo(x + 6, y0, x - 10, y1, x + 4, y1);
    context.stroke();
  }
  context.globalAlpha = 1;
}

function drawLabels(context, layout, view, scale, colours, shows, width, picked, model) {
  const many = layout.bands.length > 1;
  for (const band of layout.bands) {
    if (many) {
      const x = width < 620 ? 4 : 10, name = width < 620 ? `${band.engine.number}` : `engine ${band.engine.number}`;
      context.fillStyle = colours.line;
      context.fillRect(0, band.y - BAND / 2 - 1, width, 1);
      if (layout.left < 132) write(context, name, x, band.y + 8, colours.soft, {weight: 600});
    }
    if (layout.left < 132) continue;
    band.slots.forEach((slot, row) => {
      const parts = band.engine.slots[slot];
      let at = lastAt(parts, view.edge, (one) => one.a);
      while (at >= 0 && !shows(parts[at].lane)) at -= 1;
      const part = parts[at], lane = part?.lane;
      if (!lane || part.b < scale.from) return;
      const y = band.y + (row + 0.5) * layout.step, ended = part.b < view.edge - 0.5;
      const name = `${many ? `${band.engine.number} · ` : ""}${lane.id.slice(0, 6)}${lane.tenant ? ` ${lane.tenant}` : ""}`;
      const colour = lane === picked ? colours.ink : colours.soft;
      context.globalAlpha = ended ? 0.45 : 1;
      write(context, name, 8, y, colour, {most: 118, weight: lane === picked ? 600 : 400});
      context.globalAlpha = 1;
    });
  }
}

// ---- the strip of passes

export function drawStrip(canvas, model, view, left, colours) {
  const {context, width, height} = prepare(canvas);
  const scale = scaleOf(view, left, width), timeHeight = 34, top = 6, room = height - timeHeight - top - 8;
  const columns = new Map();
  let highest = 1, budget = 0, slowest = 0, last = null;
  for (const engine of model.engines.values()) {
    const passes = engine.passes;
    let at = Math.max(0, lastAt(passes, scale.from, (one) => one.b));
    for (; at < passes.length && passes[at].a <= view.edge; at += 1) {
      const one = passes[at], total = one.p + one.d + one.r + one.w;
      if (one.b < scale.from) continue;
      const x = Math.max(left, Math.floor(left + (one.a - scale.from) * scale.perSecond));
      if (total > highest) highest = total;
      if (one.u > budget) budget = one.u;
      if (one.b - one.a > slowest) slowest = one.b - one.a;
      last = one;
      const known = columns.get(x), w = Math.max(1, Math.min(scale.x(one.b) - x - 0.5, width - x));
      if (!known) columns.set(x, {one, total, w});
      else if (total > known.total) {
        known.one = one;
        known.total = total;
        if (w > known.w) known.w = w;
      }
    }
  }
  const full = budget && highest > budget * 0.2 ? Math.max(budget, highest) : highest * 1.15;
  for (const [x, {one, w}] of columns) {
    let y = top + room;
    for (const [count, colour] of [[one.d, colours.decode], [one.p, colours.prompt], [one.r, colours.again], [one.w, colours.padding]]) {
      const h = (count / full) * room;
      if (h <= 0) continue;
      context.fillStyle = colour;
      context.fillRect(x, y - h, w, Math.max(h, 0.7));
      y -= h;
    }
    const h = ((one.b - one.a) / (slowest || 1)) * (timeHeight - 12);
    context.fillStyle = colours.soft;
    context.globalAlpha = 0.55;
    context.fillRect(x, height - 3 - h, w, Math.max(1, h));
    context.globalAlpha = 1;
  }
  drawShares(context, columns, top, room, colours);
  if (budget && full >= budget) {
    const y = top + room - (budget / full) * room;
    context.strokeStyle = colours.soft;
    context.setLineDash([4, 4]);
    context.lineWidth = 1;
    context.beginPath();
    context.moveTo(left, Math.round(y) + 0.5);
    context.lineTo(width, Math.round(y) + 0.5);
    context.stroke();
    context.setLineDash([]);
  }
  const budgetText = budget ? `budget ${budget.toLocaleString()}${full < budget ? " ↑" : ""}` : "";
  if (left >= 100) {
    write(context, "tokens in a pass", 8, top + 7, colours.soft);
    write(context, budgetText, 8, top + 23, colours.soft, {most: left - 12});
    write(context, slowest ? `up to ${ms(slowest)}` : "", 8, height - 12, colours.soft);
  } else {
    note(context, budgetText || "tokens in a pass", left + 4, top + 9, colours);
    note(context, slowest ? `passes up to ${ms(slowest)}` : "", left + 4, height - timeHeight + 4, colours);
  }
  return {scale, last};
}

// a word on a ground of its own, so that it can be read over bars
function note(context, text, x, y, colours, colour = colours.soft) {
  if (!text) return;
  const weight = colour === colours.soft ? 400 : 600;
  context.font = `${weight} 11px ${FONT}`;
  context.fillStyle = colours.paper;
  context.globalAlpha = 0.9;
  context.fillRect(x - 4, y - 9, context.measureText(text).width + 8, 18);
  context.globalAlpha = 1;
  write(context, text, x, y, colour, {weight});
}

// MFU and MBU as lines, broken where passes lack them and where there is none
function drawShares(context, columns, top, room, colours) {
  const points = [...columns];
  if (points.some(([x], n) => n && x < points[n - 1][0])) points.sort((a, b) => a[0] - b[0]);  // of several engines
  for (const [name, colour] of [["mfu", colours.cached], ["mbu", colours.swap]]) {
    context.strokeStyle = colour;
    context.lineWidth = 1.2;
    context.beginPath();
    let before = -Infinity;
    for (const [x, {one}] of points) {
      if (one[name] === undefined) {
        before = -Infinity;
        continue;
      }
      const y = top + room * (1 - Math.min(1, one[name]));
      if (x - before > LONGEST_LINE) context.moveTo(x, y); else context.lineTo(x, y);
      before = x;
    }
    context.stroke();
  }
}

export function ms(seconds) {
  const value = 1000 * seconds;
  if (value >= 9950) return `${(value / 1000).toFixed(1)} s`;
  return value >= 995 ? `${(value / 1000).toFixed(2)} s` : value >= 10 ? `${value.toFixed(0)} ms` : `${value.toFixed(1)} ms`;
}

// ---- KV blocks

export function drawBlocks(canvas, blocks, colours, isHost, picked, hovered) {
  const {context, width, height} = prepare(canvas), {runs} = blocks;  // state, owner, cells, …
  let count = 0;
  for (let at = 2; at < runs.length; at += 3) count += runs[at];
  let size = Math.floor(Math.sqrt((width * height) / Math.max(count, 1)));
  while (size > 2 && Math.floor(width / size) * Math.floor(height / size) < count) size -= 1;
  size = Math.max(2, Math.min(size, 14));
  const across = Math.max(1, Math.floor(width / size)), gap = size > 5 ? 1.5 : size > 3 ? 1 : 0.5;
  let cell = 0;
  const fills = [colours.free, colours.cached, isHost ? colours.swap : colours.held, colours.shared];
  for (let at = 0; at < runs.length; at += 3) {
    const lane = runs[at + 1] >= 0 ? blocks.owners[runs[at + 1]] : 0;
    context.fillStyle = lane && (lane === picked || lane === hovered) ? colours.pick : fills[runs[at]];
    for (const end = cell + runs[at + 2]; cell < end; cell += 1) {
      context.fillRect((cell % across) * size, Math.floor(cell / across) * size, size - gap, size - gap);
    }
  }
  return {size, across, count};
}

export function blockAt(blocks, grid, x, y) {
  const column = Math.floor(x / grid.size), at = Math.floor(y / grid.size) * grid.across + column;
  if (column >= grid.across || at < 0 || at >= grid.count) return null;
  const {runs} = blocks;
  for (let run = 0, cell = 0; run < runs.length; run += 3) {
    cell += runs[run + 2];
    if (at >= cell) continue;
    const first = at * blocks.per_cell, last = Math.min(first + blocks.per_cell, blocks.total) - 1;
    return {state: runs[run], lane: runs[run + 1] >= 0 ? blocks.owners[runs[run + 1]] : 0, first, last};
  }
  return null;
}

// ---- the whole time, with what is shown of it

export function drawOverview(canvas, models, view, begin, end, colours) {
  const {context, width, height} = prepare(canvas);
  const scale = scaleOf({edge: end, span: Math.max(end - begin, 1)}, 0, width);
  context.fillStyle = colours.stripe;
  context.fillRect(0, 0, width, height);
  const tops = new Float64Array(Math.ceil(width) + 1);
  let highest = 1;
  for (const model of models) {
    for (const engine of model.engines.values()) {
      for (const one of engine.passes) {
        const x = Math.max(0, Math.min(tops.length - 1, Math.floor(scale.x(one.b))));
        tops[x] = Math.max(tops[x], one.run);
        highest = Math.max(highest, tops[x]);
      }
      context.fillStyle = colours.again;
      context.globalAlpha = 0.35;
      for (const one of engine.outages) {
        context.fillRect(scale.x(one.a), 0, Math.max(2, scale.x(Math.min(one.b, end)) - scale.x(one.a)), height);
      }
      context.globalAlpha = 1;
    }
  }
  context.fillStyle = colours.decode;
  context.globalAlpha = 0.55;
  let last = -Infinity;
  tops.forEach((top, x) => {
    if (!top && (x - last) / scale.perSecond > 0.8) return;  // between two passes it still runs
    if (top) last = x; else top = tops[x] = tops[x - 1];
    const h = (top / highest) * (height - 4);
    context.fillRect(x, height - h, 1, h);
  });
  context.globalAlpha = 1;
  const x0 = Math.max(0, scale.x(view.edge - view.span)), x1 = Math.min(width, scale.x(view.edge));
  context.fillStyle = colours.paper;
  context.globalAlpha = 0.6;
  context.fillRect(0, 0, x0, height);
  context.fillRect(x1, 0, width - x1, height);
  context.globalAlpha = 1;
  context.strokeStyle = colours.ink;
  context.lineWidth = 1.5;
  context.strokeRect(x0 + 0.75, 0.75, Math.max(3, x1 - x0) - 1.5, height - 1.5);
  return scale;
}
