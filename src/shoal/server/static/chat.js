// The chat page: conversations, what the reader does with them, and the keys. Text of the server goes into the page through
// chat-text.js alone. Knows the OpenAI chat API and nothing of the engine.

import { Problem, Reply, asProblem, refusal, stream } from "./chat-stream.js";
import { Store, keepFields, newChat, recallFields, titleOf } from "./chat-store.js";
import { MarkdownView, button, copy, copyButton, line } from "./chat-text.js";

const page = {};
for (const part of document.querySelectorAll("[id]")) page[part.id] = part;

const NUMBERS = ["temperature", "top_p", "top_k", "min_p", "repetition_penalty", "seed", "max_tokens"];
const FIELDS = Object.fromEntries(["system", "theme", "key", ...NUMBERS].map((name) => [name, page[name]]));
const store = new Store();
let chat = newChat();
let running = null; // the AbortController of the answer under way
let follow = true; // scroll along, unless the reader has scrolled up

// ---- the model and the settings

function headers() {
  const key = page.key.value.trim();
  return key ? { Authorization: "Bearer " + key } : {};
}

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

function colours() {
  if (page.theme.value) document.documentElement.dataset.theme = page.theme.value;
  else delete document.documentElement.dataset.theme;
}

function showProblem(problem) {
  if (problem.status === 401) page.settings.open = true;
  page.problem.replaceChildren(line("p", problem.message));
  if (problem.note) page.problem.append(line("p", problem.note, "note"));
  page.problem.hidden = false;
}

// ---- the conversation on the page

class Turn {
  constructor(message, index) {
    this.message = message;
    this.index = index;
    this.user = message.role === "user";
    this.box = document.createElement("article");
    this.box.className = "turn " + message.role;
    this.box.setAttribute("aria-label", this.user ? "You" : "Answer");
    this.text = line("div", "", "text");
    if (this.user) this.box.append(this.text);
    else this.fold();
    this.actions = line("div", "", "actions");
    this.actions.append(copyButton(this.user ? "Copy this message" : "Copy this answer", () => this.message.content));
    if (this.user) this.actions.append(button("Edit", "Edit this message", () => this.edit()));
    else this.actions.append(this.again = button("Again", "Answer again", regenerate));
    this.box.append(this.actions);
    this.view = new MarkdownView(this.text);
    this.show(message.content, message.reasoning || "", message.figures || "");
  }

  fold() {
    this.reasoning = document.createElement("details");
    this.reasoning.className = "reasoning";
    this.reasoning.append(line("summary", "Reasoning"), line("div", ""));
    this.reasoned = new MarkdownView(this.reasoning.lastElementChild);
    this.by = line("p", this.message.model || "", "by");
    this.figures = line("p", "", "figures");
    this.box.append(this.by, this.reasoning, this.text, this.figures);
  }

  show(text, reasoning, figures) {
    if (this.user) {
      this.text.textContent = text;
      return;
    }
    this.view.show(text);
    this.reasoning.hidden = !reasoning;
    if (reasoning) this.reasoned.show(reasoning);
    this.figures.textContent = figures;
  }

  edit() {
    if (running || this.editor) return;
    const box = document.createElement("textarea");
    box.value = this.message.content;
    box.rows = Math.min(12, box.value.split("\n").length + 1);
    box.setAttribute("aria-label", "Edit your message");
    const done = (send) => {
      this.editor.remove();
      this.editor = null;
      this.text.hidden = this.actions.hidden = false;
      if (send && box.value.trim()) ask(box.value.trim(), this.index);
      else page.question.focus();
    };
    box.addEventListener("keydown", (event) => {
      if (event.key === "Escape") done(false);
      else if (event.key === "Enter" && !event.shiftKey && !event.isComposing) done(true);
      else return;
      event.preventDefault();
      event.stopPropagation();
    });
    this.editor = line("div", "", "editor");
    const send = button("Send", "Send the edited message", () => done(true));
    send.className = "strong";
    this.editor.append(box, button("Cancel", "", () => done(false)), send);
    this.text.hidden = this.actions.hidden = true;
    this.box.append(this.editor);
    box.focus();
    box.setSelectionRange(box.value.length, box.value.length);
  }
}

let turns = [];

function addTurn(message) {
  page.welcome.hidden = true;
  const turn = new Turn(message, turns.length);
  turns.push(turn);
  page.talk.append(turn.box);
  follow = true;
  scroll();
  return turn;
}

function render() {
  turns = [];
  page.talk.replaceChildren(page.welcome);
  page.welcome.hidden = chat.messages.length > 0;
  for (const message of chat.messages) addTurn(message);
  markLast();
  list();
}

function markLast() {
  for (const turn of turns) if (turn.again) turn.again.hidden = turn !== turns.at(-1);
}

function scroll() {
  if (follow) page.talk.scrollTop = page.talk.scrollHeight;
}

function busy(on) {
  page.talk.setAttribute("aria-busy", String(on)); // screen readers wait for the whole answer
  page.talk.classList.toggle("busy", on);
  page.send.hidden = on;
  page.stop.hidden = !on;
}

// ---- the list of conversations

function list() {
  page.chats.replaceChildren(...store.chats().map((one) => {
    const item = document.createElement("li");
    const name = titleOf(one);
    const open = button(name, "", () => openChat(one.id));
    open.className = "open";
    if (one.id === chat.id) open.setAttribute("aria-current", "true");
    const remove = button("×", "Delete “" + name + "”", () => removeChat(one.id));
    remove.className = "remove";
    item.append(open, remove);
    return item;
  }));
  page.clear.hidden = !page.chats.childElementCount;
}

function openChat(id) {
  const found = store.chat(id);
  if (!found || (found.id === chat.id && turns.length)) return drawer(false);
  leave();
  chat = found;
  history.replaceState(null, "", "#" + id);
  render();
  drawer(false);
  page.question.focus();
}

function removeChat(id) {
  store.forget(id);
  if (id === chat.id) fresh();
  else list();
}

function drawer(open) {
  document.body.classList.toggle("chats", open);
  page.menu.setAttribute("aria-expanded", String(open));
}

// ---- asking

function body() {
  const system = page.system.value.trim();
  const messages = chat.messages.map(({ role, content }) => ({ role, content }));
  const made = {
    model: page.model.value,
    messages: system ? [{ role: "system", content: system }, ...messages] : messages,
    stream: true,
    stream_options: { include_usage: true },
  };
  for (const name of NUMBERS) if (page[name].value !== "") made[name] = Number(page[name].value);
  return made;
}

// A question, in place of what came at this message and after it.
function ask(question, at = chat.messages.length) {
  const before = chat.messages;
  chat.messages = [...before.slice(0, at), { role: "user", content: question }];
  render();
  return answer(before, question);
}

function regenerate() {
  const before = chat.messages;
  if (running || before.at(-1)?.role !== "assistant") return;
  chat.messages = before.slice(0, -1);
  render();
  answer(before, "");
}

// Get the next answer; if none comes, the conversation is as it was before.
async function answer(before, question) {
  const stopper = (running = new AbortController());
  const own = chat;
  busy(true);
  page.problem.hidden = true;
  page.told.textContent = "Waiting for the answer";
  const reply = new Reply();
  const message = { role: "assistant", content: "", model: page.model.value };
  const turn = addTurn(message);
  turn.box.classList.add("live");
  markLast();
  let drawing = 0;
  const draw = () => {
    drawing = 0;
    turn.show(reply.text, reply.reasoning, reply.summary());
    scroll();
  };
  try {
    if (!page.model.value || page.model.value === "…") await loadModels();
    message.model = turn.by.textContent = page.model.value;
    await stream(body(), headers(), stopper.signal, reply, () => { drawing ||= requestAnimationFrame(draw); });
  } catch (error) {
    reply.reason = stopper.signal.aborted ? "stopped" : "failed";
    if (!stopper.signal.aborted) showProblem(asProblem(error));
  }
  cancelAnimationFrame(drawing);
  const kept = reply.text || reply.reasoning || !["stopped", "failed"].includes(reply.reason);
  Object.assign(message, { content: reply.text, reasoning: reply.reasoning, figures: reply.summary() });
  own.messages = kept ? [...own.messages, message] : before;
  if (own.messages.length) store.save(own);
  if (running !== stopper) return list(); // another chat was opened meanwhile
  running = null;
  busy(false);
  turn.box.classList.remove("live");
  if (kept) {
    draw();
    page.told.textContent = "Answer ended: " + reply.summary();
    history.replaceState(null, "", "#" + own.id);
    list();
  } else { // put the question back so that it can be sent again
    render();
    page.question.value ||= question;
    fit();
  }
}

// ---- other actions

function leave() {
  if (running) running.abort();
  running = null;
  page.problem.hidden = true;
  busy(false);
}

function fresh() {
  leave();
  chat = newChat();
  history.replaceState(null, "", location.pathname + location.search);
  render();
  drawer(false);
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

function lastOf(role) {
  return turns.filter((turn) => turn.message.role === role).at(-1);
}

async function copyLast() {
  const turn = lastOf("assistant");
  if (turn) page.told.textContent = (await copy(turn.message.content)) ? "Copied" : "Copying is not allowed";
}

function toggleSettings() {
  page.settings.open = !page.settings.open;
  if (page.settings.open) page.system.focus();
}

const SHORTCUTS = { KeyN: fresh, KeyR: regenerate, KeyC: copyLast, KeyS: toggleSettings };

function pressed(event) {
  const typing = event.target.closest && event.target.closest("input, textarea, select");
  if (event.key === "Escape") {
    if (page.keys.open) return; // the dialog closes itself
    if (page.settings.open) page.settings.open = false;
    else if (document.body.classList.contains("chats")) drawer(false);
    else stop();
  } else if (event.altKey && !event.ctrlKey && !event.metaKey && SHORTCUTS[event.code]) {
    event.preventDefault();
    SHORTCUTS[event.code]();
  } else if (!typing && event.key === "/") {
    event.preventDefault();
    page.question.focus();
  } else if (!typing && event.key === "?") page.keys.showModal();
}

page.composer.addEventListener("submit", (event) => {
  event.preventDefault();
  const question = page.question.value.trim();
  if (!question || running) return;
  page.question.value = "";
  fit();
  page.settings.open = false;
  ask(question);
});
page.question.addEventListener("keydown", (event) => {
  if (event.key === "ArrowUp" && !page.question.value && !running && lastOf("user")) {
    event.preventDefault();
    lastOf("user").edit();
  }
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
page.menu.addEventListener("click", () => drawer(!document.body.classList.contains("chats")));
page.help.addEventListener("click", () => page.keys.showModal());
page.clear.addEventListener("click", () => {
  if (!confirm("Delete all chats in this browser?")) return;
  for (const one of store.chats()) store.forget(one.id);
  fresh();
});
page.model.addEventListener("change", title);
page.talk.addEventListener("scroll", () => {
  follow = page.talk.scrollHeight - page.talk.scrollTop - page.talk.clientHeight < 60;
});
document.addEventListener("keydown", pressed);
document.addEventListener("click", (event) => {
  if (!page.settings.contains(event.target)) page.settings.open = false;
});
page.settings.addEventListener("input", () => {
  keepFields(store, FIELDS);
  colours();
});
page.key.addEventListener("change", () => loadModels().catch((error) => showProblem(asProblem(error))));
addEventListener("storage", list); // another tab has saved a conversation

recallFields(store, FIELDS);
colours();
chat = store.chat(location.hash.slice(1)) || chat;
render();
fit();
loadModels().catch((error) => showProblem(asProblem(error)));
