// What the live page knows: lanes, passes and figures, from the lines of a stream or a recording. Owns their meaning;
// draws nothing and touches no document. Times are seconds since the recording began.

export const PROMPT = 0;
export const RECOMPUTE = 1;
export const DECODE = 2;
const KEEP_S = 300;  // of a live stream; a recording is kept whole

// the last index whose key(item) <= value, or -1; items are sorted by it
export function lastAt(items, value, key) {
  let low = 0, high = items.length;
  while (low < high) {
    const middle = (low + high) >> 1;
    if (key(items[middle]) <= value) low = middle + 1; else high = middle;
  }
  return low - 1;
}

class Engine {
  constructor(number) {
    this.number = number;
    this.passes = [];
    this.decoding = new Map();  // lane → its open segment
    this.decodes = 0;  // passes with decodes so far
    this.lastEnd = 0;
    this.outages = [];  // {a, b, epoch}; b is Infinity while it is down
    this.slots = [];  // slot → parts of lanes, in order of time
  }
}

export class LiveModel {
  constructor(keepAll = false, name = "") {
    this.keepAll = keepAll;
    this.name = name;
    this.reset();
  }

  reset() {
    this.lanes = new Map();
    this.moved = new Set();  // lanes that have been on several engines
    this.engines = new Map();
    this.marks = [];  // one per line: figures as of then
    this.events = [];  // of the whole server, for captions: [kind, t, …]
    this.end = 0;  // time of the newest line
    this.begin = null;
    this.refused = 0;
    this.finished = 0;
    this.tenants = new Set();
    this.tiers = new Set();
    this.tokens = 0;
  }

  engine(number) {
    if (!this.engines.has(number)) this.engines.set(number, new Engine(number));
    return this.engines.get(number);
  }

  // ---- lines

  apply(line) {
    if (this.begin === null) this.start(line);
    for (const one of line.new ?? []) this.open(one);
    const events = (line.ev ?? []).slice().sort((a, b) => a[1] - b[1]);
    let at = 0;
    for (const pass of line.passes ?? []) {
      while (at < events.length && events[at][1] < pass.b) this.event(events[at++]);
      this.pass(pass);
    }
    while (at < events.length) this.event(events[at++]);
    if (this.keyAfter) {
      this.adopt(this.keyAfter);
      this.keyAfter = null;
    }
    this.end = Math.max(this.end, line.t);
    this.mark(line);
    if (!this.keepAll) this.trim();
  }

  start(line) {
    this.begin = line.t;
    if (!line.key) return;
    for (const one of line.key.lanes) this.open(one);
    for (const [number, up] of Object.entries(line.key.engines)) {
      const engine = this.engine(Number(number));
      if (!up) engine.outages.push({a: line.t, b: Infinity, epoch: null});
    }
    this.keyAfter = line.key;
  }

  adopt(key) {  // the first line of a stream says at its end which lanes decode
    for (const [number, lanes] of Object.entries(key.decoding)) {
      const engine = this.engine(Number(number));
      for (const n of lanes) {
        const lane = this.lanes.get(n);
        if (lane && !engine.decoding.has(lane)) this.decode(engine, lane, engine.lastEnd || this.begin, engine.decodes);
      }
    }
  }

  open([n, id, engine, at, tenant, tier, prompt, most, outputs]) {
    const lane = {
      n, id, at, tenant, tier, prompt, most, outputs, parts: [], story: [["arrive", at, engine]], end: Infinity, reason: "",
      chunks: 0, again: 0, tokens: outputs, cached: 0, waitingFor: "", lastHow: "",
    };
    this.lanes.set(n, lane);
    this.tenants.add(tenant);
    this.tiers.add(tier);
    this.begin = this.begin === null ? at : Math.min(this.begin, at);
    this.part(lane, engine, at);
  }

  part(lane, number, at) {  // the lane goes on in a row of this engine
    const engine = this.engine(number), last = lane.parts.at(-1);
    if (last) last.b = Math.min(last.b, at);
    let slot = engine.slots.findIndex((parts) => !parts.length || parts.at(-1).b < at - 0.15);
    if (slot < 0) slot = engine.slots.push([]) - 1;
    const part = {lane, engine: number, slot, a: at, b: Infinity, segments: [], drafts: [], waits: [{a: at, how: ""}]};
    engine.slots[slot].push(part);
    lane.parts.push(part);
    if (lane.parts.length > 1) this.moved.add(lane);
    return part;
  }

  partOn(lane, number, at) {
    const last = lane.parts.at(-1);
    if (last.engine === number) return last;
    return this.part(lane, number, at);
  }

  event(event) {
    const [kind, t, who] = event;
    if (kind === "up" || kind === "down") return this.engineEvent(kind, t, who, event[3]);
    if (kind === "refuse") {
      this.refused += 1;
      this.events.push(event);
      return;
    }
    const lane = this.lanes.get(who);
    if (!lane) return;
    lane.story.push(event.filter((_, at) => at !== 2));
    if (kind === "admit") {
      lane.cached = Math.max(lane.cached, event[5]);
    } else if (kind === "preempt") {
      lane.parts.at(-1).waits.push({a: t, how: event[4]});
      this.events.push(event);
    } else if (kind === "move") {
      lane.end = Infinity;
      lane.reason = "";
      const last = lane.parts.at(-1), isLast = this.engine(event[4]).slots[last.slot]?.at(-1) === last;
      if (event[3] === event[4] && isLast) last.b = Infinity;
      else this.part(lane, event[4], t);  // on another engine, or another request has its row by now
      lane.parts.at(-1).waits.push({a: t, how: "move"});
      this.events.push(event);
    } else if (kind === "end") {
      lane.end = lane.parts.at(-1).b = t;
      lane.reason = event[3];
      lane.tokens = event[4] || lane.tokens;
      lane.kept = [event[5], event[6]];
      this.finished += event[3] === "stop" || event[3] === "length";
    }
  }

  engineEvent(kind, t, number, epoch) {
    const engine = this.engine(number), last = engine.outages.at(-1);
    this.events.push([kind, t, number, epoch]);
    if (kind === "down") {
      engine.outages.push({a: t, b: Infinity, epoch: null});
      for (const lane of [...engine.decoding.keys()]) this.undecode(engine, lane);
    } else if (last && last.b === Infinity) {
      last.b = t;
      last.epoch = epoch;
    }
  }

  // ---- passes

  decode(engine, lane, at, from) {
    const part = this.partOn(lane, engine.number, at);
    const segment = {kind: DECODE, a: at, b: Infinity, from, n: 0};
    part.segments.push(segment);
    engine.decoding.set(lane, segment);
  }

  undecode(engine, lane) {
    const segment = engine.decoding.get(lane);
    if (!segment) return;
    engine.decoding.delete(lane);
    segment.b = engine.lastEnd;
    segment.n = engine.decodes - segment.from;
    lane.tokens += segment.n;
  }

  pass(one) {
    const engine = this.engine(one.e);
    for (const n of one.out ?? []) {
      const lane = this.lanes.get(n);
      if (lane) this.undecode(engine, lane);
    }
    for (const n of one.in ?? []) {
      const lane = this.lanes.get(n);
      if (lane && !engine.decoding.has(lane)) this.decode(engine, lane, one.a, engine.decodes);
    }
    for (const [n, start, count, kind] of one.c ?? []) this.chunk(one, n, start, count, kind);
    for (const [n, proposed, accepted] of one.x ?? []) {
      const lane = this.lanes.get(n);
      if (!lane) continue;
      lane.tokens += accepted;
      lane.parts.at(-1).drafts.push({t: one.a, b: one.b, proposed, accepted});
    }
    if (engine.decoding.size) engine.decodes += 1;
    engine.lastEnd = one.b;
    this.tokens += one.d;
    const {a, b, p, d, r, w, u, run, wait, kv, mfu, mbu, n} = one;
    engine.passes.push({a, b, p, d, r, w, u, run, wait, kv, mfu, mbu, n, lanes: engine.decoding.size});
  }

  chunk(pass, n, start, count, kind) {
    const lane = this.lanes.get(n);
    if (!lane) return;
    const part = this.partOn(lane, pass.e, pass.a);
    part.segments.push({kind, a: pass.a, b: pass.b, start, n: count});
    if (kind === PROMPT) lane.chunks += 1; else lane.again += count;
    if (kind === PROMPT && start + count >= lane.prompt) lane.tokens += 1;
  }

  mark(line) {
    const last = this.marks.at(-1), views = {...last?.views, ...line.views};
    for (const one of Object.values(line.views ?? {})) {
      for (const map of [one.blocks, one.host_blocks]) if (map) map.runs = Int32Array.from(map.runs.flat());  // minutes of them are kept
    }
    this.marks.push({
      t: line.t, tiers: line.tiers ?? last?.tiers ?? {}, views, made: line.tenants ?? {}, finished: this.finished,
      tokens: this.tokens,
    });
  }

  trim() {
    const oldest = this.end - KEEP_S;
    if (this.begin >= oldest - 30) return;
    for (const [n, lane] of this.lanes) if (lane.end < oldest) this.lanes.delete(n);
    for (const lane of this.moved) if (lane.end < oldest) this.moved.delete(lane);
    for (const engine of this.engines.values()) {
      engine.passes = engine.passes.slice(Math.max(0, lastAt(engine.passes, oldest, (one) => one.b)));
      engine.slots = engine.slots.map((parts) => parts.filter((part) => part.b >= oldest));
      engine.outages = engine.outages.filter((one) => one.b >= oldest);
      for (const parts of engine.slots) {
        for (const part of parts) {
          part.segments = part.segments.filter((one) => one.b >= oldest);
          part.drafts = part.drafts.filter((one) => one.b >= oldest);
        }
      }
    }
    this.marks = this.marks.filter((one) => one.t >= oldest);
    this.events = this.events.filter((one) => one[1] >= oldest);
    this.begin = oldest;
  }

  // ---- questions

  markAt(t) {
    return this.marks[lastAt(this.marks, t, (one) => one.t)];
  }

  passAt(engine, t) {
    return engine.passes[lastAt(engine.passes, t, (one) => one.b)];
  }

  // the figures of all engines at a time
  figures(t) {
    const found = {running: 0, waiting: 0, held: 0, cached: 0, total: 0, host: 0, passMs: 0, tokens: 0, up: 0, passes: 0};
    for (const engine of this.engines.values()) {
      const at = lastAt(engine.passes, t, (one) => one.b), pass = engine.passes[at];
      const isDown = engine.outages.some((one) => one.a <= t && t < one.b);
      found.up += !isDown;
      if (!pass) continue;
      const idle = isDown || t - pass.b > 2;
      found.running += idle ? 0 : pass.run;
      found.waiting += idle ? 0 : pass.wait;
      const [held, cached, total, host] = pass.kv;
      found.held += isDown ? 0 : held; found.cached += isDown ? 0 : cached; found.total += total; found.host += host;
      const first = lastAt(engine.passes, t - 2, (one) => one.b) + 1;
      let busy = 0;
      for (let n = first; n <= at; n += 1) {
        const one = engine.passes[n];
        found.tokens += one.d;
        busy += one.b - one.a;
        found.passes += 1;
        if (one.mfu !== undefined) found.mfu = one.mfu;
        if (one.mbu !== undefined) found.mbu = one.mbu;
      }
      if (at >= first) found.passMs = Math.max(found.passMs, 1000 * busy / (at - first + 1));
    }
    found.tokens /= 2;
    return found;
  }

  // tokens computed for each tenant in the seconds before
  shares(t, seconds = 10) {
    const found = new Map();
    for (let n = lastAt(this.marks, t, (one) => one.t); n >= 0 && this.marks[n].t > t - seconds; n -= 1) {
      for (const [tenant, tokens] of Object.entries(this.marks[n].made)) {
        found.set(tenant, (found.get(tenant) ?? 0) + tokens);
      }
    }
    return [...found].sort((a, b) => b[1] - a[1]);
  }

  segmentEnd(part, segment) {
    return segment.b === Infinity ? this.engine(part.engine).lastEnd : segment.b;
  }

  decodesOf(part, segment) {
    return segment.b === Infinity ? this.engine(part.engine).decodes - segment.from : segment.n;
  }

  tokensOf(lane) {
    const part = lane.parts.at(-1), open = part.segments.at(-1);
    return lane.tokens + (open && open.b === Infinity ? this.decodesOf(part, open) : 0);
  }
}

// A recording: lines of one or several panes. A second header begins further panes: a front was restarted.
export function readRecording(text) {
  const panes = [];
  let first = 0;
  for (const row of text.split("\n")) {
    if (!row) continue;
    let line;
    try {
      line = JSON.parse(row);
    } catch {
      continue;  // the last line of a recording that goes on
    }
    if (line.shoal_live !== undefined) {
      if (line.shoal_live !== 1) throw new Error(`this recording has format ${line.shoal_live}; this page reads format 1`);
      first = panes.length;
      for (const name of line.panes) panes.push({name, head: line, lines: []});
      continue;
    }
    const pane = panes[first + (line.pane ?? 0)];
    if (!pane) throw new Error("this is not a recording of Shoal: its first line has no field shoal_live");
    pane.lines.push(line);
  }
  if (!panes.length) throw new Error("this is not a recording of Shoal: it has no line with the field shoal_live");
  return panes.filter((pane) => pane.lines.length);
}
