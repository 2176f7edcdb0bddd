// The chat page: sends messages, shows the answer as it streams, counts its tokens. All server output is inserted
// as text, never as HTML. Knows the OpenAI chat API and nothing of the engine.
"use strict";

const page = {};
for (const part of document.querySelectorAll("[id]")) page[part.id] = part;

const SETTINGS = ["system", "temperature", "max_tokens", "key"];
const messages = []; // of the conversation, without the system prompt
let running = null; // the AbortController of the answer under way
let follow = true; // scroll along, unless the reader has scrolled up

// ---- settings

function remember() {
  try {
    for (const name of SETTINGS) sessionStorage.setItem("shoal." + name, page[name].value);
  } catch { /* no session storage: settings last as long as the page */ }
}

function recall() {
  try {
    for (const name of SETTINGS) page[name].value = sessionStorage.getItem("shoal." + name) ?? page[name].value;
  } catch { /* as above */ }
}

function headers() {
  const key = page.key.value.trim();
  return key ? { Authorization: "Bearer " + key } : {};
}

// ---- problems

class Problem extends Error {
  constructor(message, note = "", status = 0) {
    super(message);
    this.note = note;
    this.status = status;
  }
}

async function refusal(response) {
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

function showProblem(problem) {
  if (problem.status === 401) page.settings.open = true;
  page.problem.replaceChildren(line("p", problem.message));
  if (problem.note) page.problem.append(line("p", problem.note, "note"));
  page.problem.hidden = false;
}

function asProblem(error) {
  if (error instanceof Problem) return error;
  return new Problem("The connection to the server was lost.", "Is it still running?");
}

// ---- the model

async function loadModels() {
  const response = await fetch("v1/models", { headers: headers() });
  if (!response.ok) throw await refusal(response);
  const models = (await response.json()).data || [];
  if (!models.length) throw new Problem("The server has no model.");
  page.model.replaceChildren(...models.map((model) => line("option", model.id)));
  page.model.disabled = models.length < 2;
  page.problem.hidden = true;
  title();
}

function title() {
  document.title = page.model.value + " · Shoal";
}

// ---- the conversation on the page

function line(tag, text, name) {
  const made = document.createElement(tag);
  made.textContent = text;
  if (name) made.className = name;
  return made;
}

function showTurn(role, text) {
  page.welcome.hidden = true;
  const turn = document.createElement("article");
  turn.className = "turn " + role;
  turn.setAttribute("aria-label", role === "user" ? "You" : "Answer");
  turn.append(line("div", text, "text"));
  if (role !== "user") turn.append(line("p", "", "figures"));
  page.talk.append(turn);
  follow = true;
  scroll();
  return turn;
}

function scroll() {
  if (follow) page.talk.scrollTop = page.talk.scrollHeight;
}

function busy(on) {
  page.talk.setAttribute("aria-busy", String(on)); // screen readers wait for the whole answer
  page.send.hidden = on;
  page.stop.hidden = !on;
}

// ---- an answer under way

class Answer {
  constructor(turn) {
    this.turn = turn;
    this.words = turn.querySelector(".text").appendChild(document.createTextNode(""));
    this.figures = turn.querySelector(".figures");
    this.askedMs = performance.now();
    this.firstMs = this.lastMs = 0;
    this.tokens = 0;
    this.usage = null;
    this.reason = "";
    this.drawing = 0;
  }

  take(chunk) {
    if (chunk.error) throw new Problem(chunk.error.message || String(chunk.error), "The answer ended early.");
    if (chunk.usage) this.usage = chunk.usage;
    const choice = chunk.choices && chunk.choices[0];
    if (!choice) return;
    const delta = choice.delta || {};
    if (delta.content || !(delta.role || choice.finish_reason)) { // a token, even if it has no text yet
      this.lastMs = performance.now();
      this.firstMs ||= this.lastMs;
      this.tokens += 1;
    }
    if (delta.content) this.words.appendData(delta.content);
    this.reason = choice.finish_reason || this.reason;
    this.drawing ||= requestAnimationFrame(() => this.draw());
  }

  draw() {
    this.drawing = 0;
    this.figures.textContent = this.summary();
    scroll();
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

  end(reason) {
    this.reason = reason || this.reason;
    cancelAnimationFrame(this.drawing);
    this.turn.classList.remove("live");
    this.draw();
    page.told.textContent = "Answer ended: " + this.summary();
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

function asked() {
  const system = page.system.value.trim();
  const body = {
    model: page.model.value,
    messages: system ? [{ role: "system", content: system }, ...messages] : [...messages],
    stream: true,
    stream_options: { include_usage: true },
  };
  for (const name of ["temperature", "max_tokens"]) {
    if (page[name].value !== "") body[name] = Number(page[name].value);
  }
  return JSON.stringify(body);
}

async function stream(answer, signal) {
  const response = await fetch("v1/chat/completions", {
    method: "POST",
    headers: { "Content-Type": "application/json", ...headers() },
    body: asked(),
    signal,
  });
  if (!response.ok) throw await refusal(response);
  for await (const data of events(response.body)) {
    if (data === "[DONE]") return;
    answer.take(JSON.parse(data));
  }
  if (!answer.reason) throw new Problem("The connection ended before the answer did.");
}

// ---- user actions

async function send(question) {
  const stopper = (running = new AbortController());
  busy(true);
  page.problem.hidden = true;
  page.told.textContent = "Waiting for the answer";
  const turns = [showTurn("user", question), showTurn("assistant live", "")];
  messages.push({ role: "user", content: question });
  const answer = new Answer(turns[1]);
  let reason = "";
  try {
    if (!page.model.value || page.model.value === "…") await loadModels();
    await stream(answer, stopper.signal);
  } catch (error) {
    reason = stopper.signal.aborted ? "stopped" : "failed";
    if (!stopper.signal.aborted) showProblem(asProblem(error));
  }
  if (running !== stopper) return; // a new chat has begun meanwhile
  answer.end(reason);
  if (answer.words.data || !reason) messages.push({ role: "assistant", content: answer.words.data });
  else takeBack(question, turns);
  running = null;
  busy(false);
}

function takeBack(question, turns) {
  // no answer: put the question back so that it can be sent again
  messages.pop();
  for (const turn of turns) turn.remove();
  page.welcome.hidden = messages.length > 0;
  page.question.value ||= question;
  fit();
}

function fresh() {
  if (running) running.abort();
  running = null;
  messages.length = 0;
  page.talk.replaceChildren(page.welcome);
  page.welcome.hidden = false;
  page.problem.hidden = true;
  busy(false);
  page.question.focus();
}

function stop() {
  if (running) running.abort();
  page.question.focus();
}

function fit() {
  page.question.style.height = "auto";
  page.question.style.height = page.question.scrollHeight + "px";
}

page.composer.addEventListener("submit", (event) => {
  event.preventDefault();
  const question = page.question.value.trim();
  if (!question || running) return;
  page.question.value = "";
  fit();
  page.settings.open = false;
  send(question);
});
page.question.addEventListener("keydown", (event) => {
  if (event.key !== "Enter" || event.shiftKey || event.isComposing) return;
  event.preventDefault();
  page.composer.requestSubmit();
});
page.question.addEventListener("input", fit);
page.panel.addEventListener("submit", (event) => {
  event.preventDefault();
  page.settings.open = false;
});
page.stop.addEventListener("click", stop);
page.fresh.addEventListener("click", fresh);
page.model.addEventListener("change", title);
page.talk.addEventListener("scroll", () => {
  follow = page.talk.scrollHeight - page.talk.scrollTop - page.talk.clientHeight < 60;
});
document.addEventListener("keydown", (event) => {
  if (event.key !== "Escape") return;
  if (page.settings.open) page.settings.open = false;
  else stop();
});
document.addEventListener("click", (event) => {
  if (!page.settings.contains(event.target)) page.settings.open = false;
});
page.settings.addEventListener("input", remember);
page.key.addEventListener("change", () => loadModels().catch((error) => showProblem(asProblem(error))));

recall();
fit();
loadModels().catch((error) => showProblem(asProblem(error)));
