// The live page: connects, keeps the time that is shown, and has everything drawn. Owns controls and panels; what lines
// mean is live-model.js's, pixels are live-draw.js's, sentences live-story.js's.

import {LiveModel, lastAt, readRecording} from "./live-model.js";
import {blockAt, clock, drawBlocks, drawLanes, drawOverview, drawStrip, ms, palette, partAt} from "./live-draw.js";
import {aboutLane, captionOf, nameOf, storyOf} from "./live-story.js";

const $ = (id) => document.getElementById(id);
const SPANS = [0.5, 1, 2, 5, 10, 20, 40, 60, 120, 300];
const FRAME_MS = 33, SLOWEST_MS = 200, PANEL_MS = 250, OVERVIEW_MS = 200, PANES = 4;
const AT_ONCE = -Infinity;  // the panels are filled with the next frame, also with the first: what is below them never moves
const embedded = $("recording");  // in a report, the recording is part of the document
const replaying = embedded !== null || location.hash.startsWith("#replay");

const view = {edge: 0, span: 20};
const filter = {tenant: "*", tier: "*"};
const shows = (lane) => (filter.tenant === "*" || lane.tenant === filter.tenant) && (filter.tier === "*" || lane.tier === filter.tier);
let panes = [];
let told = 0;  // the pane whose figures are shown
let paused = false, dirty = true, stale = true, offset = null, colours = palette();
let picked = null, hovered = null;  // {pane, lane}
let lastFrame = 0, lastPanels = AT_ONCE, lastOverview = 0, playedAt = null, frames = 0, pauseMs = FRAME_MS;

// ---- panes

function makePane(name, keepAll) {
  const element = $("pane").content.cloneNode(true).firstElementChild;
  const pane = {
    name, model: new LiveModel(keepAll, name), element, lanes: element.querySelector(".lanes"),
    strip: element.querySelector(".strip"), empty: element.querySelector(".empty"), left: 12, drawn: null, lines: [], at: 0,
  };
  element.querySelector("h2 span").textContent = name;
  element.querySelector("h2 button").addEventListener("click", () => tellPane(pane));
  element.querySelector(".empty code").textContent =
    `curl ${location.origin}/v1/completions -H 'Content-Type: application/json' -d '{"prompt": "Fish", "max_tokens": 200}'`;
  pane.lanes.addEventListener("pointermove", (event) => overLanes(pane, event));
  pane.lanes.addEventListener("pointerleave", () => leave());
  pane.lanes.addEventListener("click", (event) => clickLanes(pane, event));
  pane.lanes.addEventListener("wheel", (event) => wheel(event), {passive: false});
  pane.strip.addEventListener("pointermove", (event) => overStrip(pane, event));
  pane.strip.addEventListener("pointerleave", () => leave());
  $("panes").append(element);
  return pane;
}

// show the figures of this pane beside all of them, or no longer
function tellPane(pane) {
  const on = !(document.body.classList.contains("figures") && panes[told] === pane);
  told = panes.indexOf(pane);
  document.body.classList.toggle("figures", on);
  for (const one of panes) one.element.querySelector("h2 button").setAttribute("aria-pressed", String(on && one === pane));
  dirty = true;
  lastPanels = AT_ONCE;
}

const begin = () => Math.min(...panes.map((pane) => pane.begin ?? pane.model.begin ?? 0));
const end = () => Math.max(...panes.map((pane) => pane.end ?? pane.model.end));

// ---- a live stream

const here = location.origin + location.pathname.replace(/live$/, "");  // without a password that the address may have
const events = `${here}live/events`;

function connect() {
  const pane = panes[0] ?? makePane("live", false);
  panes = [pane];
  const source = new EventSource(events);
  source.onmessage = ({data}) => {
    const line = JSON.parse(data);
    if (line.shoal_live !== undefined) {
      if (line.shoal_live !== 1) return problem(`This page reads format 1 and the server sends ${line.shoal_live}: reload it.`);
      pane.model.reset();
      offset = null;
      $("model").textContent = line.model ?? "";
      return state(paused ? "paused" : "live");
    }
    pane.model.apply(line);
    const wanted = line.t - performance.now() / 1000;
    offset = offset === null || Math.abs(wanted - offset) > 1 ? wanted : offset + (wanted - offset) * 0.1;
    dirty = true;
  };
  addEventListener("pagehide", () => source.close());
  source.onerror = async () => {
    state("lost");
    if (source.readyState !== EventSource.CLOSED) return;  // the browser connects again by itself
    const answer = await fetch(events, {method: "HEAD"}).catch(() => null);
    if (answer && (answer.status === 401 || answer.status === 403)) {
      problem("This page needs an admin API key, or a direct connection from the machine that the server runs on.");
    } else {
      setTimeout(connect, 1500);
    }
  };
}

function state(name) {
  const words = {live: replaying ? "playing" : "live", paused: "paused", lost: "connection lost; trying again", connecting: "connecting"};
  $("state").dataset.is = name;
  $("state").textContent = words[name];
}

function problem(text) {
  $("problem").textContent = text;
  $("problem").hidden = false;
}

// ---- a recording

async function recordingText() {
  if (embedded) {
    const bytes = Uint8Array.from(atob(embedded.textContent), (one) => one.charCodeAt(0));
    return new Response(new Blob([bytes]).stream().pipeThrough(new DecompressionStream("gzip"))).text();
  }
  const answer = await fetch(`${here}live/recording`);
  if (!answer.ok) throw new Error(`the recording cannot be read: ${answer.status}`);
  return answer.text();
}

async function replay() {
  $("speed-label").hidden = false;
  document.body.classList.add("replay");
  document.title = "Shoal: a recording";
  try {
    const found = readRecording(await recordingText()).slice(0, PANES);
    panes = found.map((one) => {
      const pane = makePane(one.name, true);
      for (const line of one.lines) pane.model.apply(line);
      pane.begin = pane.model.begin;
      pane.end = pane.model.end;
      return pane;
    });
    $("panes").className = ["", "", "two", "three", "four"][panes.length];
    document.body.classList.toggle("many", panes.length > 1);
    for (const pane of panes) pane.element.querySelector("h2").hidden = panes.length < 2;
    $("model").textContent = found[0].head.model ?? "";
    const span = end() - begin();
    setSpan(SPANS.find((one) => one >= span / 3) ?? 300);
    view.edge = begin() + Math.min(0.5, span / 10);
    playedAt = performance.now();
    fillFilters();
    state("live");
    if (embedded) {  // a picture, until it is played
      setSpan(Math.max(1, span));
      view.edge = end();
      setPaused(true);
    }
  } catch (error) {
    problem(String(error.message ?? error));
  }
}

function play(now) {
  if (playedAt !== null && !paused) {
    view.edge = Math.min(end(), view.edge + ((now - playedAt) / 1000) * Number($("speed").value));
    dirty = true;
    if (view.edge >= end()) setPaused(true);
  }
  playedAt = now;
}

// ---- time

function setPaused(on) {
  if (paused && !on && replaying && view.edge >= end()) view.edge = begin();
  if (on && !replaying && !view.edge) view.edge = end();  // before the first frame
  paused = on;
  $("pause").textContent = on ? (replaying ? "Play" : "Resume") : "Pause";
  $("pause").setAttribute("aria-pressed", String(on));
  state(on ? "paused" : "live");
  dirty = true;
}

function setSpan(span) {
  view.span = Math.min(300, Math.max(0.2, span));
  $("span").textContent = view.span >= 1 ? `${+view.span.toFixed(1)} s` : `${Math.round(view.span * 1000)} ms`;
  dirty = true;
}

function zoom(direction) {
  const at = SPANS.findIndex((one) => one >= view.span * 0.999);
  setSpan(SPANS[Math.max(0, Math.min(SPANS.length - 1, at + direction))]);
}

function scrub(t) {
  const first = begin(), last = end();
  if (!replaying && t >= last - 0.3) return setPaused(false);
  if (!paused) setPaused(true);
  view.edge = Math.max(first + Math.min(0.5, view.span), Math.min(last, t));
  dirty = true;
}

function wheel(event) {
  if (embedded && !event.ctrlKey) return;  // the report scrolls
  event.preventDefault();
  if (Math.abs(event.deltaX) > Math.abs(event.deltaY)) scrub(view.edge + (event.deltaX / 600) * view.span);
  else setSpan(view.span * Math.exp(event.deltaY / 500));
}

// ---- the mouse

function tip(event, text) {
  const box = $("tip");
  box.textContent = text;
  box.hidden = !text;
  if (!text) return;
  const {width, height} = box.getBoundingClientRect();
  box.style.left = `${Math.min(event.clientX + 14, innerWidth - width - 8)}px`;
  box.style.top = `${event.clientY + height + 24 > innerHeight ? event.clientY - height - 12 : event.clientY + 16}px`;
}

function leave() {
  $("tip").hidden = true;
  hovered = null;
  dirty = true;
}

function laneUnder(pane, event) {
  if (!pane.drawn) return null;
  const box = pane.lanes.getBoundingClientRect();
  return partAt(pane.drawn.layout, pane.drawn.scale, event.clientX - box.left, event.clientY - box.top, shows);
}

function overLanes(pane, event) {
  const part = laneUnder(pane, event), lane = part?.lane ?? null;
  if (hovered?.lane !== lane) dirty = true;
  hovered = lane && {pane, lane};
  if (!lane) return tip(event, "");
  const {model} = pane, done = model.tokensOf(lane);
  const what = lane.end === Infinity ? waitingWhy(model, lane) || "running" : `ended: ${lane.reason}`;
  tip(event, `${nameOf(lane)}${lane.tenant ? ` · ${lane.tenant}` : ""}${lane.tier ? ` · ${lane.tier}` : ""}\n` +
    `prompt ${lane.prompt.toLocaleString()}, out ${done.toLocaleString()} of ${lane.most.toLocaleString()}\n` +
    `engine ${part.engine} · ${what}`);
}

function waitingWhy(model, lane) {
  for (const one of Object.values(model.markAt(view.edge)?.views ?? {})) {
    const found = one.queue.find(([n]) => n === lane.n);
    if (found) return `waits: ${found[1]}`;
  }
  return "";
}

function clickLanes(pane, event) {
  const part = laneUnder(pane, event);
  pick(part ? {pane, lane: part.lane} : null);
}

function pick(found) {
  picked = found;
  $("story").hidden = !found;
  lastPanels = AT_ONCE;
  dirty = true;
}

function overStrip(pane, event) {
  const box = pane.strip.getBoundingClientRect();
  if (!pane.drawnStrip) return;
  const t = pane.drawnStrip.scale.t(event.clientX - box.left);
  for (const engine of pane.model.engines.values()) {
    const pass = engine.passes[lastAt(engine.passes, t, (one) => one.b) + 1];  // the first that ends after it
    if (!pass || pass.a - 0.5 > t) continue;
    const shares = [pass.mfu === undefined ? "" : `MFU ${(100 * pass.mfu).toFixed(0)}%`, pass.mbu === undefined ? "" : `MBU ${(100 * pass.mbu).toFixed(0)}%`];
    return tip(event, [
      `pass ${pass.n.toLocaleString()} on engine ${engine.number}: ${ms(pass.b - pass.a)}`,
      `${pass.p.toLocaleString()} prompt, ${pass.d.toLocaleString()} decode, ${pass.r.toLocaleString()} recomputed, ${pass.w.toLocaleString()} padding of ${pass.u.toLocaleString()}`,
      `${pass.run} running, ${pass.wait} waiting`, shares.filter(Boolean).join(", "),
    ].filter(Boolean).join("\n"));
  }
  tip(event, "");
}

// ---- panels

function fill(list, items, make) {
  while (list.children.length > items.length) list.lastElementChild.remove();
  items.forEach((item, n) => {
    const old = list.children[n], key = JSON.stringify(item.key ?? item);
    if (old && old.dataset.key === key) return;
    const made = make(item, n);
    made.dataset.key = key;
    if (old) old.replaceWith(made); else list.append(made);
  });
}

function element(name, text = "", kind = "") {
  const made = document.createElement(name);
  made.textContent = text;
  if (kind) made.className = kind;
  return made;
}

function fillTiles(figures) {
  const percent = figures.total ? Math.round((100 * figures.held) / figures.total) : 0;
  const engines = panes[told].model.engines.size;
  const tiles = [
    ["running", figures.running.toLocaleString(), ""],
    ["waiting", figures.waiting.toLocaleString(), ""],
    ["tokens/s", Math.round(figures.tokens).toLocaleString(), ""],
    ["pass", figures.passMs ? ms(figures.passMs / 1000) : "–", ""],
    ["KV held", `${percent}%`, figures.total ? ` of ${figures.total.toLocaleString()} blocks` : ""],
  ];
  if (figures.mfu !== undefined) tiles.push(["MFU", `${Math.round(100 * figures.mfu)}%`, ""]);
  if (figures.mbu !== undefined) tiles.push(["MBU", `${Math.round(100 * figures.mbu)}%`, ""]);
  tiles.push([engines > 1 ? "engines up" : "engine", engines > 1 ? `${figures.up} of ${engines}` : figures.up ? "up" : engines ? "down" : "–", ""]);
  fill($("tiles"), tiles, ([name, value, rest]) => {
    const made = element("div"), shown = element("dd", value);
    if (rest) shown.append(element("small", rest));
    made.append(element("dt", name), shown);
    return made;
  });
}

function fillQueue(model, mark, waiting) {
  const rows = [];
  for (const one of Object.values(mark?.views ?? {})) {
    for (const [n, why, slack] of one.queue) {
      const lane = model.lanes.get(n);
      if (lane && shows(lane) && rows.length < 6) rows.push([nameOf(lane), lane.tenant, why, slack]);
    }
  }
  const busy = waiting > 0 && rows.length;
  $("queue-count").textContent = busy ? `${waiting.toLocaleString()} wait` : "empty";
  fill($("queue"), busy ? rows : [], ([id, tenant, why, slack]) => {
    const made = element("li"), name = element("span", tenant ? `${id} · ${tenant}` : id);
    const slackText = slack === null ? "" : slack < 0 ? `${ms(-slack)} late` : `${ms(slack)} left`;
    made.append(name, element("span", why, "why"), element("span", slackText, slack !== null && slack < 0 ? "late" : "note"));
    made.title = why;
    return made;
  });
}

function fillBlocks(model, mark, figures) {
  const views = Object.entries(mark?.views ?? {}).slice(0, 4), maps = $("maps"), shown = [];
  for (const [number, one] of views) {
    const name = views.length > 1 ? `engine ${number}` : "";
    shown.push({name, blocks: one.blocks, isHost: false});
    if (one.host_blocks) shown.push({name: `${name ? `${name}, ` : ""}host memory`, blocks: one.host_blocks, isHost: true});
  }
  $("blocks-count").textContent = figures.total
    ? `${figures.held.toLocaleString()} held, ${figures.cached.toLocaleString()} cached` + (figures.host ? `, ${figures.host.toLocaleString()} on the host` : "")
    : "";
  $("host-legend").hidden = !shown.some((one) => one.isHost);
  if (!shown.length) return fill(maps, [[replaying ? "This recording has no block map." : "Known when an engine is up."]], ([text]) => element("p", text));
  fill(maps, shown.map(({name, isHost}) => [name, isHost]), makeMap);
  shown.forEach(({blocks, isHost}, n) => {
    const canvas = maps.children[n].querySelector("canvas");
    Object.assign(canvas, {shown: blocks, isHost});
    canvas.grid = drawBlocks(canvas, blocks, colours, isHost, picked?.lane.n, hovered?.lane.n);
    canvas.style.height = `${Math.min(132, Math.ceil(canvas.grid.count / canvas.grid.across) * canvas.grid.size + 1)}px`;
  });
}

function makeMap([name]) {
  const box = element("div"), canvas = element("canvas");
  canvas.setAttribute("role", "img");
  canvas.setAttribute("aria-label", `KV blocks${name ? `: ${name}` : ""}`);
  canvas.addEventListener("pointermove", (event) => overBlocks(canvas, event));
  canvas.addEventListener("pointerleave", () => leave());
  if (name) box.append(element("p", name));
  box.append(canvas);
  return box;
}

function overBlocks(canvas, event) {
  const box = canvas.getBoundingClientRect(), {model} = panes[told];
  const found = canvas.grid && blockAt(canvas.shown, canvas.grid, event.clientX - box.left, event.clientY - box.top);
  const lane = found?.lane ? model.lanes.get(found.lane) : null;
  hovered = lane && {pane: panes[told], lane};
  dirty = true;
  lastPanels = AT_ONCE;
  if (!found) return tip(event, "");
  const host = canvas.isHost ? "host " : "";
  const blocks = found.first === found.last ? `${host}block ${found.first}` : `${host}blocks ${found.first} to ${found.last}`;
  const held = canvas.isHost ? "swapped out, until its request runs again" : "held";
  const what = ["free", "cached: a new prompt may hit it", held, "shared by several requests"][found.state];
  tip(event, `${blocks}: ${what}${lane ? `\n${nameOf(lane)}${lane.tenant ? ` · ${lane.tenant}` : ""}` : ""}`);
}

function fillPromises(mark) {
  const rows = [];
  for (const [tier, found] of Object.entries(mark?.tiers ?? {})) {
    for (const what of ["ttft", "gap"]) if (found[what]) rows.push([tier, what, ...found[what]]);
  }
  fill($("promises").tBodies[0], rows, ([tier, what, p50, p95, p99, , promise]) => {
    const row = element("tr");
    row.append(element("td", what === "ttft" || rows.length === 1 ? tier || "all" : ""), element("td", what === "ttft" ? "TTFT" : "gap", "note"));
    for (const value of [p50, p95, p99]) {
      row.append(element("td", ms(value), promise === null ? "" : value <= promise ? "kept" : "broken"));
    }
    row.append(element("td", promise === null ? "–" : ms(promise), "note"));
    return row;
  });
}

const tints = new Map();
function tint(tenant) {
  if (!tints.has(tenant)) tints.set(tenant, `tint${tints.size % 8}`);
  return tints.get(tenant);
}

function fillTenants(model, t) {
  const shares = model.shares(t).slice(0, 8), total = shares.reduce((sum, one) => sum + one[1], 0) || 1;
  const items = shares.map(([tenant, made]) => [tenant, Math.round((100 * made) / total), Math.round(made / 10)]);
  fill($("shares"), items.map(([tenant, share]) => [tenant, share]), ([tenant]) => element("div", "", tint(tenant)));
  items.forEach(([, share], n) => { $("shares").children[n].style.width = `${share}%`; });
  fill($("tenants"), items, ([tenant, share, rate]) => {
    const made = element("li", "", tint(tenant));
    made.append(element("span", tenant || "no tenant"), element("span", `${share}% · ${rate.toLocaleString()}/s`));
    return made;
  });
}

function fillFilters() {
  for (const [id, name] of [["tenant", "tenants"], ["tier", "tiers"]]) {
    const select = $(id), known = new Set([...select.options].map((one) => one.value));
    const found = new Set(panes.flatMap((pane) => [...pane.model[name]]));
    for (const value of found) {
      if (known.has(value)) continue;
      const option = element("option", value || "none");
      option.value = value;
      select.append(option);
    }
  }
}

function fillStory() {
  if (!picked) return;
  const {pane, lane} = picked;
  $("story-id").textContent = nameOf(lane);
  $("story-about").textContent = aboutLane(lane);
  fill($("story-list"), storyOf(pane.model, lane), ([t, text]) => {
    const made = element("li");
    made.append(element("time", t === null ? "now" : t < 0.0005 ? "0" : `+${ms(t)}`), element("span", text));
    return made;
  });
}

function fillPanels() {
  const {model} = panes[told], t = view.edge, figures = model.figures(t), mark = model.markAt(t);
  fillTiles(figures);
  fillQueue(model, mark, figures.waiting);
  fillBlocks(model, mark, figures);
  fillPromises(mark);
  fillTenants(model, t);
  fillFilters();
  fillStory();
  for (const pane of panes) {
    const own = pane.model.figures(t), at = pane.model.markAt(t);
    const ttft = Object.values(at?.tiers ?? {}).map((one) => one.ttft?.[1]).filter((one) => one !== undefined);
    pane.element.querySelector("h2 .note").textContent = [
      `${(at?.finished ?? 0).toLocaleString()} done`, `${(at?.tokens ?? 0).toLocaleString()} tokens`, `${own.running} running`,
      ...(ttft.length ? [`TTFT p95 ${ms(Math.max(...ttft))}`] : []),
    ].join(" · ");
    pane.empty.hidden = replaying || (pane.drawn?.layout.bands ?? []).some((band) => band.slots.length > 0);
  }
  if (!$("caption").hidden) {
    const text = captionOf(model, t);
    if ($("caption").textContent !== text) $("caption").textContent = text;
  }
  const scrubbed = $("scrub"), first = begin(), whole = Math.max(end() - first, 0.001);
  if (document.activeElement !== scrubbed || !paused) scrubbed.value = String(Math.round((1000 * (view.edge - first)) / whole));
  scrubbed.setAttribute("aria-valuetext", clock(view.edge));
}

// ---- the loop

function frame(now) {
  requestAnimationFrame(frame);
  if (now - lastFrame < pauseMs || !panes.length || document.hidden) return;
  if (replaying) play(now);
  else if (!paused && offset !== null) {
    const next = Math.min(now / 1000 + offset, panes[0].model.end + 0.3);
    if (next > view.edge || view.edge - next > 1) {
      view.edge = next;
      dirty = true;
    }
  }
  if (stale && now - lastPanels > PANEL_MS) {
    lastPanels = now;
    stale = false;
    fillPanels();
  }
  if (!dirty) return;
  dirty = false;
  stale = true;
  lastFrame = now;
  frames += 1;
  for (const pane of panes) {
    pane.drawn = drawLanes(pane.lanes, pane.model, view, colours, shows, picked?.lane, hovered?.lane);
    pane.drawnStrip = drawStrip(pane.strip, pane.model, view, pane.drawn.layout.left, colours);
  }
  if (paused || now - lastOverview > OVERVIEW_MS) {
    lastOverview = now;
    drawOverview($("overview"), panes.map((pane) => pane.model), view, begin(), end(), colours);
  }
  // at most a third of the time is spent drawing, however much there is to draw
  pauseMs = Math.min(SLOWEST_MS, Math.max(FRAME_MS, 3 * (performance.now() - now)));
}

// ---- controls

function setTheme(name) {
  document.documentElement.dataset.theme = name;
  $("theme").textContent = name === "dark" ? "Light" : "Dark";
  colours = palette();
  dirty = true;
  lastPanels = AT_ONCE;
}

function setExplain(on) {
  $("caption").hidden = !on;
  $("explain").setAttribute("aria-pressed", String(on));
  dirty = true;
}

function remember(name, value) {
  try {
    localStorage.setItem(name, value);
  } catch { /* private windows may refuse */ }
}

function recalled(name) {
  try {
    return localStorage.getItem(name);
  } catch {
    return null;
  }
}

function keys(event) {
  if (event.target.closest("select, input") || event.ctrlKey || event.metaKey || event.altKey) return;
  const found = {
    " ": () => setPaused(!paused), "+": () => zoom(-1), "=": () => zoom(-1), "-": () => zoom(1),
    ArrowLeft: () => scrub(view.edge - view.span / 10), ArrowRight: () => scrub(view.edge + view.span / 10), Escape: () => pick(null),
  }[event.key];
  if (!found || (event.key === " " && event.target.closest("button"))) return;
  event.preventDefault();
  found();
}

const prefers = matchMedia("(prefers-color-scheme: dark)");
setTheme(recalled("shoal-live-theme") ?? (prefers.matches ? "dark" : "light"));
prefers.addEventListener("change", () => recalled("shoal-live-theme") ?? setTheme(prefers.matches ? "dark" : "light"));
setSpan(innerWidth < 620 ? 10 : 20);
setExplain(location.hash.includes("demo"));
$("pause").addEventListener("click", () => setPaused(!paused));
$("in").addEventListener("click", () => zoom(-1));
$("out").addEventListener("click", () => zoom(1));
$("explain").addEventListener("click", () => setExplain($("caption").hidden));
$("theme").addEventListener("click", () => {
  const name = document.documentElement.dataset.theme === "dark" ? "light" : "dark";
  remember("shoal-live-theme", name);
  setTheme(name);
});
for (const name of ["tenant", "tier"]) {
  $(name).addEventListener("change", () => { filter[name] = $(name).value; dirty = true; lastPanels = AT_ONCE; });
}
$("scrub").addEventListener("input", () => scrub(begin() + ($("scrub").value / 1000) * (end() - begin())));
$("story-close").addEventListener("click", () => pick(null));
addEventListener("keydown", keys);
addEventListener("resize", () => { dirty = true; });
document.addEventListener("visibilitychange", () => { dirty = true; });
// for tests: what is known and what is shown
globalThis.shoalLive = {panes: () => panes, view, filter, picked: () => picked, laneUnder, scrub, frames: () => frames};
addEventListener("pageshow", (event) => { if (event.persisted && !replaying) connect(); });  // back on a page that was left
if (replaying) replay(); else connect();
requestAnimationFrame(frame);
