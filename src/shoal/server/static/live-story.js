// Sentences about what is seen: a request's story, a caption for the moment. Owns words; draws nothing.

import {PROMPT, RECOMPUTE} from "./live-model.js";
import {ms} from "./live-draw.js";

const REASONS = {
  stop: "ended by itself", length: "reached its max_tokens", abort: "its client left", timeout: "its time was over",
  rejected: "refused", error: "failed", lost: "ended as its engine went down", handed: "handed to a decode engine",
};

const tokens = (n) => `${n.toLocaleString()} token${n === 1 ? "" : "s"}`;

export function nameOf(lane) {
  return lane.id.replace(/\.0$/, "").slice(0, 8);
}

export function aboutLane(lane) {
  const who = [lane.tenant && `tenant ${lane.tenant}`, lane.tier && `tier ${lane.tier}`].filter(Boolean).join(", ");
  return `${who ? `${who}; ` : ""}prompt of ${tokens(lane.prompt)}, at most ${tokens(lane.most)} out`;
}

// [seconds since it arrived, sentence], from arrival to end
export function storyOf(model, lane) {
  const told = [];
  for (const [kind, t, ...rest] of lane.story) {
    if (kind === "arrive") told.push([t, "arrived"]);
    if (kind === "admit") {
      const cached = rest[2] ? `; ${tokens(rest[2])} of its prompt were cached` : "";
      told.push([t, `${rest[3] ? "started again" : "admitted"} on engine ${rest[0]} after a wait of ${ms(rest[1])}${cached}`]);
    }
    if (kind === "first") told.push([t, `first token, ${ms(rest[0])} after its arrival`]);
    if (kind === "preempt") told.push([t, `preempted (${rest[1]}): ${tokens(rest[0])} of KV given up`]);
    if (kind === "move") {
      told.push([t, rest[0] === rest[1] ? `goes on after engine ${rest[0]} was restarted` : `moved from engine ${rest[0]} to engine ${rest[1]}`]);
    }
    if (kind === "end") {
      const kept = [["first token", rest[2]], ["gaps", rest[3]]].filter(([, one]) => one !== null && one !== undefined);
      const promise = kept.map(([what, one]) => `${what} ${one ? "as promised" : "later than promised"}`).join(", ");
      told.push([t, `${REASONS[rest[0]] ?? rest[0]}, with ${tokens(rest[1])}${promise ? `; ${promise}` : ""}`]);
    }
  }
  for (const [t, text] of chunksOf(lane)) told.push([t, text]);
  told.sort((a, b) => a[0] - b[0]);
  if (lane.end === Infinity) told.push([null, `so far ${tokens(model.tokensOf(lane))}`]);
  return told.map(([t, text]) => [t === null ? null : t - lane.at, text]);
}

function chunksOf(lane) {
  const found = [];
  let run = null;
  for (const part of lane.parts) {
    for (const one of part.segments) {
      if (one.kind !== PROMPT && one.kind !== RECOMPUTE) {
        run = null;
        continue;
      }
      if (run && run.kind === one.kind) {
        run.chunks += 1;
        run.n += one.n;
        run.b = one.b;
      } else {
        run = {kind: one.kind, a: one.a, b: one.b, n: one.n, chunks: 1};
        found.push(run);
      }
    }
  }
  return found.map(({kind, a, b, n, chunks}) => {
    const what = kind === PROMPT ? "prompt computed" : "computed again";
    return [a, `${what}: ${tokens(n)} in ${chunks} chunk${chunks === 1 ? "" : "s"}, ${ms(b - a)}`];
  });
}

// what a visitor should look at now
export function captionOf(model, t) {
  const lately = (kind, seconds) => model.events.findLast((one) => one[0] === kind && one[1] <= t && one[1] > t - seconds);
  for (const engine of model.engines.values()) {
    if (engine.outages.some((one) => one.a <= t && t < one.b)) {
      return "The engine has died. Its requests are kept by the front: their streams stay open and wait for the next engine.";
    }
  }
  if (lately("up", 6) && model.events.some((one) => one[0] === "down" && one[1] < t)) {
    return "A new engine is up. It computes each request's tokens again (red), and the streams go on where they stopped: no token is lost or sent twice.";
  }
  if (lately("move", 4)) return "Requests have moved to another engine and go on there, token for token.";
  if (lately("preempt", 4)) {
    return "KV memory ran out. A request gave its blocks up (red mark); it waits, then its lost positions are computed again.";
  }
  return captionOfLanes(model, t);
}

function captionOfLanes(model, t) {
  const alive = [...model.lanes.values()].filter((lane) => lane.at <= t && lane.end > t);
  const giant = alive.find((lane) => {
    const last = lane.parts.at(-1).segments.findLast((one) => one.a <= t);
    return lane.prompt >= 1000 && last && last.kind === PROMPT && t - last.b < 1.5;
  });
  if (giant) {
    const beside = alive.some((lane) => lane !== giant && lane.parts.at(-1).segments.at(-1)?.b === Infinity);
    return `A prompt of ${tokens(giant.prompt)} is computed in chunks (orange)` + (beside ? " beside the decodes (blue): no stream stops for it." : ".");
  }
  const waiting = alive.filter((lane) => !lane.parts.at(-1).segments.some((one) => one.a <= t));
  const by = new Map();
  for (const lane of waiting) by.set(lane.tenant, (by.get(lane.tenant) ?? 0) + 1);
  const [tenant, most] = [...by].sort((a, b) => b[1] - a[1])[0] ?? ["", 0];
  if (tenant && most >= 6 && most >= waiting.length * 0.5) {
    return `Tenant ${tenant} floods the server: its requests wait in line (thin), and the other tenants keep their shares.`;
  }
  if (waiting.length > 2) return "Thin lines are requests that wait. The queue says why each of them does.";
  if (alive.length) return "Each lane is a request, each column a forward pass: orange is its prompt, blue its tokens. The batch is rebuilt at every pass.";
  return "No request runs. Send one, and it appears here as a lane.";
}
