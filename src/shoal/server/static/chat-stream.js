// An answer as it comes: reads the server's events, counts and times its tokens. Knows OpenAI's API, no page.

export class Problem extends Error {
  constructor(message, note = "", status = 0) {
    super(message);
    this.note = note;
    this.status = status;
  }
}

export async function refusal(response) {
  const text = await response.text();
  let message = text.trim().slice(0, 500) || response.statusText || "no reason was given";
  try {
    const said = JSON.parse(text).error;
    message = (said && said.message) || (typeof said === "string" ? said : message);
  } catch { /* not JSON: show what it is */ }
  const again = response.headers.get("Retry-After");
  let note = "The server answered " + response.status + ".";
  if (response.status === 401) note += " Enter the API key under Settings.";
  else if (again) note += " Try again in " + again + " s.";
  return new Problem(message, note, response.status);
}

export function asProblem(error) {
  if (error instanceof Problem) return error;
  if (error instanceof SyntaxError) return new Problem("The answer cannot be read: " + error.message);
  return new Problem("The connection to the server was lost.", "Is it still running?");
}

// The text of one answer so far, and its figures.
export class Reply {
  constructor() {
    this.text = "";
    this.reasoning = "";
    this.askedMs = performance.now();
    this.firstMs = this.lastMs = 0;
    this.tokens = 0;
    this.usage = null;
    this.reason = "";
  }

  take(chunk) {
    if (chunk.error) throw new Problem(chunk.error.message || String(chunk.error), "The answer ended early.");
    if (chunk.usage) this.usage = chunk.usage;
    const choice = chunk.choices && chunk.choices[0];
    if (!choice) return;
    const delta = choice.delta || {};
    const reasoning = delta.reasoning_content || delta.reasoning || "";
    if (delta.content || reasoning || !(delta.role || choice.finish_reason)) { // a token, even if it has no text yet
      this.lastMs = performance.now();
      this.firstMs ||= this.lastMs;
      this.tokens += 1;
    }
    this.text += delta.content || "";
    this.reasoning += reasoning;
    this.reason = choice.finish_reason || this.reason;
  }

  summary() {
    const parts = [];
    const tokens = this.usage ? this.usage.completion_tokens : this.tokens;
    const tookMs = this.lastMs - this.firstMs;
    if (this.firstMs) parts.push("first token " + seconds(this.firstMs - this.askedMs));
    if (tokens > 1 && tookMs > 0) parts.push(((tokens - 1) * 1000 / tookMs).toFixed(1) + " tokens/s");
    if (tokens) parts.push(tokens + (tokens === 1 ? " token" : " tokens"));
    if (this.usage) parts.push(prompted(this.usage));
    if (this.reason === "length") parts.push("stopped at the limit");
    else if (this.reason && this.reason !== "stop") parts.push(this.reason);
    return parts.join(" · ");
  }
}

function seconds(ms) {
  return ms < 1000 ? ms.toFixed(0) + " ms" : (ms / 1000).toFixed(2) + " s";
}

function prompted(usage) {
  const cached = usage.prompt_tokens_details && usage.prompt_tokens_details.cached_tokens;
  return usage.prompt_tokens + " in the prompt" + (cached ? ", " + cached + " of them cached" : "");
}

async function* events(body) {
  const reader = body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  try {
    for (;;) {
      const { done, value } = await reader.read();
      rest += done ? "\n\n" : value;
      const parts = rest.split(/\r?\n\r?\n/);
      rest = parts.pop();
      yield* parts.map(dataOf).filter(Boolean);
      if (done) return;
    }
  } finally {
    reader.cancel().catch(() => {}); // closes the connection
  }
}

function dataOf(event) {
  const lines = event.split(/\r?\n/).filter((said) => said.startsWith("data:"));
  return lines.map((said) => said.slice(5).trim()).join("\n");
}

// Send a body and feed the reply; `changed` is called after each event.
export async function stream(body, headers, signal, reply, changed) {
  const response = await fetch("v1/chat/completions", {
    method: "POST",
    headers: { "Content-Type": "application/json", ...headers },
    body: JSON.stringify(body),
    signal,
  });
  if (!response.ok) throw await refusal(response);
  for await (const data of events(response.body)) {
    if (data === "[DONE]") return;
    reply.take(JSON.parse(data));
    changed();
  }
  if (!reply.reason) throw new Problem("The connection ended before the answer did.");
}
