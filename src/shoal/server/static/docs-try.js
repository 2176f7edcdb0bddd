// Examples to paste, and sending a request from the page. Knows one operation of an OpenAPI document at a time; asks this
// server only.

import { button, codeBox, make, tabs } from "./docs-page.js";
import { bodyExample, exampleOf, jsonOf, needsKey, resolve } from "./docs-schema.js";

const LONGEST = 200000; // characters of an answer that are shown
const LOCAL = /\bhttp\S{3}localhost:8000/g; // the address in examples of the document

export function base() {
  return new URL(".", location.href).href.replace(/\/$/, "");
}

function exampleBody(operation) {
  const media = jsonOf(resolve(operation.requestBody).content);
  return media ? bodyExample(media) : undefined;
}

function valueOf(parameter) {
  return String(parameter.example ?? exampleOf(parameter.schema || {}));
}

function withValues(path, values) {
  return path.replace(/\{(\w+)\}/g, (whole, name) => encodeURIComponent(values[name] ?? name));
}

// ---- examples

function written(value) {
  const short = JSON.stringify(value);
  return short.length < 110 ? short : JSON.stringify(value, null, 2);
}

function quoted(text) {
  return "'" + text.replaceAll("'", "'\\''") + "'";
}

function curl({ path, method, operation, parameters }) {
  const values = Object.fromEntries(parameters.map((one) => [one.name, valueOf(one)]));
  const how = ["get", "post"].includes(method) ? "" : "-X " + method.toUpperCase() + " ";
  const body = exampleBody(operation);
  const bare = method === "post" && body === undefined ? "-X POST " : how;
  const lines = ["curl " + bare + base() + withValues(path, values)];
  if (needsKey(operation)) lines.push('-H "Authorization: Bearer $SHOAL_API_KEY"');
  if (body !== undefined) lines.push("-H 'Content-Type: application/json'", "-d " + quoted(written(body)));
  return lines.join(" \\\n  ");
}

export function examples(one) {
  const samples = (one.operation["x-codeSamples"] || []).map(({ lang, source }) => [lang, source.replace(LOCAL, base())]);
  return tabs("Examples", [["curl", curl(one)], ...samples].map(([name, text]) => {
    return [name, make("div", name.toLowerCase(), codeBox(text))];
  }));
}

// ---- trying it

function field(id, title, control) {
  const label = make("label", "", title);
  label.htmlFor = control.id = id;
  return [label, control];
}

// `key`: returns the API key that was entered; `refused`: called if the server asks for one
export function tryIt(one, key, refused) {
  const { operation, parameters, id } = one;
  const inputs = parameters.map((parameter) => {
    const input = make("input", "");
    input.value = parameter.required ? valueOf(parameter) : "";
    return { parameter, input };
  });
  const body = exampleBody(operation);
  const text = body === undefined ? null : make("textarea", "");
  if (text) {
    text.value = JSON.stringify(body, null, 2);
    text.rows = Math.min(16, text.value.split("\n").length + 1);
    text.spellcheck = false;
  }
  const form = make("form", "try",
    ...inputs.flatMap(({ parameter, input }) => field(id + "-" + parameter.name, parameter.name, input)),
    ...(text ? field(id + "-body", "Body", text) : []));
  const send = make("button", "strong", "Send");
  send.type = "submit";
  const answer = answerBox();
  let running = null;
  const stop = button("Stop", () => running?.abort());
  stop.hidden = true;
  form.append(make("div", "row", send, stop), answer.box);
  form.addEventListener("submit", async (event) => {
    event.preventDefault();
    if (running) return;
    const problem = text && notJson(text.value);
    if (problem) return answer.fail(problem);
    running = new AbortController();
    send.disabled = true;
    stop.hidden = false;
    try {
      await exchange(request(one, inputs, text, key()), running.signal, answer, refused);
    } catch (error) {
      answer.fail(error.name === "AbortError" ? "Stopped." : "The connection to the server was lost.");
    }
    running = null;
    send.disabled = false;
    stop.hidden = true;
  });
  return form;
}

function notJson(text) {
  try {
    JSON.parse(text);
    return "";
  } catch (error) {
    return "The body is not JSON: " + error.message;
  }
}

function request({ path, method, operation }, inputs, text, key) {
  const given = inputs.filter(({ input }) => input.value !== "");
  const values = Object.fromEntries(given.map(({ parameter, input }) => [parameter.name, input.value]));
  const query = new URLSearchParams(given.filter(({ parameter }) => parameter.in === "query")
    .map(({ parameter, input }) => [parameter.name, input.value])).toString();
  const headers = key && needsKey(operation) ? { Authorization: "Bearer " + key } : {};
  const options = { method: method.toUpperCase(), headers };
  if (text || method === "post") {
    headers["Content-Type"] = "application/json";
    options.body = text ? text.value : "{}";
  }
  return [base() + withValues(path, values) + (query ? "?" + query : ""), options];
}

async function exchange([url, options], signal, answer, refused) {
  const begun = performance.now();
  const since = () => Math.round(performance.now() - begun) + " ms";
  answer.begin();
  const response = await fetch(url, { ...options, signal });
  const kind = (response.headers.get("Content-Type") || "").split(";")[0];
  const head = [response.status + " " + response.statusText, kind, "first byte after " + since()];
  answer.tell(head.filter((part) => part.trim()).join(" · "));
  if (response.status === 401) refused();
  const text = await show(response, answer);
  if (kind === "application/json" && text.length < LONGEST) answer.replace(pretty(text));
  answer.tell([...head, "all after " + since()].filter((part) => part.trim()).join(" · "));
}

// as it comes, so that a stream is seen as one
async function show(response, answer) {
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  let text = "";
  for (;;) {
    const { done, value } = await reader.read();
    if (done) return text;
    text += value;
    answer.add(value.slice(0, Math.max(0, LONGEST - (text.length - value.length))));
    if (text.length > LONGEST) {
      answer.add("\n… (the rest is not shown)");
      await reader.cancel();
      return text;
    }
  }
}

function pretty(text) {
  try {
    return JSON.stringify(JSON.parse(text), null, 2);
  } catch {
    return text;
  }
}

function answerBox() {
  const status = make("p", "note");
  status.setAttribute("role", "status");
  const code = make("code", "");
  const pre = make("pre", "", code);
  pre.tabIndex = 0;
  pre.setAttribute("role", "region");
  pre.setAttribute("aria-label", "Answer");
  pre.hidden = true;
  return {
    box: make("div", "answer", status, pre),
    begin() { code.textContent = ""; pre.hidden = false; status.textContent = "Sent."; },
    tell(text) { status.textContent = text; },
    add(text) { code.append(text); },
    replace(text) { code.textContent = text; },
    fail(text) { status.textContent = text; },
  };
}
