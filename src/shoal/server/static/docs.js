// The API page: reads openapi.json and renders it. All of it is inserted as text, never as HTML. Knows OpenAPI 3
// and nothing of Shoal's endpoints.
"use strict";

const page = {};
for (const part of document.querySelectorAll("[id]")) page[part.id] = part;

const METHODS = ["get", "post", "put", "patch", "delete", "head", "options"];
const DEPTH = 4; // of fields within fields; a schema may contain itself
const HUGE = 2 ** 31 - 1; // larger limits are not shown
let spec = {};

// ---- making elements

function make(tag, name, ...parts) {
  const made = document.createElement(tag);
  if (name) made.className = name;
  made.append(...parts.filter((part) => part !== null && part !== undefined && part !== ""));
  return made;
}

// `code` in a description is shown as code, an empty line begins a paragraph; no other markup
function prose(text) {
  return String(text || "").split("`").map((part, at) => (at % 2 ? make("code", "", part) : part));
}

function paragraphs(text) {
  return String(text || "").split(/\n\s*\n/).filter((part) => part.trim()).map((part) => make("p", "", ...prose(part.trim())));
}

// ---- reading schemas

function resolve(thing) {
  for (let steps = 0; thing && thing.$ref && steps < 20; steps += 1) {
    const path = thing.$ref.replace(/^#\//, "").split("/").map((key) => key.replace(/~1/g, "/").replace(/~0/g, "~"));
    thing = path.reduce((at, key) => (at || {})[key], spec);
  }
  return thing || {};
}

// the type of a field; null is not mentioned
function choices(schema) {
  const all = (schema.anyOf || schema.oneOf || []).map(resolve);
  const some = all.filter((one) => one.type !== "null");
  return some.length ? some : all;
}

function kind(given, depth = 0) {
  const schema = resolve(given);
  const deeper = (one) => (depth < DEPTH ? kind(one, depth + 1) : "…");
  if (schema.const !== undefined) return JSON.stringify(schema.const);
  if (schema.enum) return schema.enum.map((value) => JSON.stringify(value)).join(" or ");
  if (choices(schema).length) return [...new Set(choices(schema).map(deeper))].join(" or ");
  const types = [].concat(schema.type || (fields(schema).length ? "object" : "anything"));
  return types.map((type) => (type === "array" && schema.items ? "list of " + deeper(schema.items) : type)).join(" or ");
}

function fields(given) {
  const schema = resolve(given);
  const inherited = (schema.allOf || []).flatMap(fields);
  const must = new Set(schema.required || []);
  return inherited.concat(
    Object.entries(schema.properties || {}).map(([name, value]) => ({ name, schema: value, must: must.has(name) })),
  );
}

// the nested objects of a field: its own, those of its items and of its alternatives
function objectsIn(given, depth = 0) {
  const schema = resolve(given);
  if (fields(schema).length) return [schema];
  if (depth > DEPTH) return [];
  return [...choices(schema), ...(schema.items ? [schema.items] : [])].flatMap((one) => objectsIn(one, depth + 1));
}

function limits(given) {
  const schema = resolve(given);
  const told = [];
  const say = (words, value) => value !== undefined && value !== null && told.push(words + " " + JSON.stringify(value));
  const bound = (words, value) => Math.abs(value) < HUGE && told.push(words + " " + value);
  say("default", schema.default);
  for (const one of [schema, ...choices(schema)]) {
    bound("at least", one.minimum);
    bound("above", one.exclusiveMinimum);
    bound("at most", one.maximum);
    bound("below", one.exclusiveMaximum);
    const least = one.minLength ?? one.minItems;
    if (least === 1) told.push("not empty");
    else bound("shortest", least || undefined);
    bound("longest", one.maxLength ?? one.maxItems ?? one.maxProperties);
    say("like", one.pattern);
  }
  return [...new Set(told)].join(", ");
}

function meaning(given) {
  const schema = resolve(given);
  const said = [given.description, schema.description, ...choices(schema).map((one) => one.description)];
  return paragraphs(said.find((text) => text && !fields(schema).length));
}

// ---- tables

function table(heads, rows) {
  const head = make("thead", "", make("tr", "", ...heads.map((text) => cell("th", "col", text))));
  return make("div", "scroll", make("table", "", head, make("tbody", "", ...rows)));
}

function cell(tag, scope, ...parts) {
  const made = make(tag, "", ...parts);
  if (scope) made.scope = scope;
  return made;
}

function fieldTable(list, depth = 0) {
  const sorted = [...list.filter((field) => field.must), ...list.filter((field) => !field.must)];
  return table(["Field", "Type", "Meaning"], sorted.flatMap((field) => fieldRows(field, depth)));
}

function fieldRows({ name, schema, must, place }, depth) {
  const told = meaning(schema);
  if (limits(schema)) told.push(make("div", "kind", limits(schema)));
  const title = cell("th", "row", make("code", "", name), place ? make("span", "kind", " " + place) : "");
  if (must) title.append(" ", make("span", "must", "required"));
  const row = make("tr", "", title, cell("td", "", make("span", "kind", kind(schema))), cell("td", "", ...told));
  return [row, ...more(depth < DEPTH ? objectsIn(schema) : [], name, depth + 1)];
}

// the fields of a field, in a row of their own below it
function more(objects, name, depth) {
  if (!objects.length) return [];
  const wide = cell("td", "", ...objects.map((inner) => inside(name, inner, depth)));
  wide.colSpan = 3;
  return [make("tr", "more", wide)];
}

function inside(name, schema, depth) {
  const title = schema.title ? name + ": " + schema.title : "fields of " + name;
  return make("details", "", make("summary", "", title), fieldTable(fields(schema), depth));
}

function bodyTables(media) {
  return objectsIn((media || {}).schema || {}).map((schema) => fieldTable(fields(schema)));
}

function jsonOf(content) {
  const types = Object.keys(content || {});
  return (content || {})[types.find((type) => type.includes("json")) || types[0]];
}

// ---- an example to paste

function exampleOf(given, depth = 0) {
  const schema = resolve(given);
  const said = [schema.example, (schema.examples || [])[0], schema.const, schema.default, (schema.enum || [])[0]];
  const known = said.find((value) => value !== undefined && value !== null);
  if (known !== undefined) return known;
  if (choices(schema).length && depth < DEPTH) return exampleOf(choices(schema)[0], depth + 1);
  const list = fields(schema).filter((field) => field.must);
  if (list.length && depth < DEPTH) {
    return Object.fromEntries(list.map((field) => [field.name, exampleOf(field.schema, depth + 1)]));
  }
  const type = [].concat(schema.type || "object")[0];
  if (type === "array") return schema.items && depth < DEPTH ? [exampleOf(schema.items, depth + 1)] : [];
  return { string: "text", integer: 1, number: 1, boolean: true, null: null }[type] ?? {};
}

function bodyExample(media) {
  const named = Object.values(media.examples || {}).map((one) => resolve(one).value)[0];
  return media.example ?? named ?? exampleOf(media.schema || {});
}

function written(value) {
  const short = JSON.stringify(value);
  return short.length < 110 ? short : JSON.stringify(value, null, 2);
}

function quoted(text) {
  return "'" + text.replaceAll("'", "'\\''") + "'";
}

function curl(path, method, operation) {
  const parameters = (operation.parameters || []).map(resolve);
  const filled = path.replace(/\{(\w+)\}/g, (whole, name) => {
    const parameter = parameters.find((one) => one.name === name);
    return encodeURIComponent(parameter ? String(parameter.example ?? exampleOf(parameter.schema || {})) : name);
  });
  const base = new URL(".", location.href).href.replace(/\/$/, "");
  const lines = ["curl " + (["get", "post"].includes(method) ? "" : "-X " + method.toUpperCase() + " ") + base + filled];
  if ((operation.security || spec.security || []).some((one) => Object.keys(one).length)) {
    lines.push('-H "Authorization: Bearer $SHOAL_API_KEY"');
  }
  const media = jsonOf(resolve(operation.requestBody).content);
  if (media) {
    lines.push("-H 'Content-Type: application/json'", "-d " + quoted(written(bodyExample(media))));
  }
  return lines.join(" \\\n  ");
}

function curlBox(text) {
  const box = make("div", "curl", make("pre", "", make("code", "", text)));
  if (!navigator.clipboard) return box; // available only over https or from this machine
  const button = make("button", "", "Copy");
  button.type = "button";
  button.addEventListener("click", async () => {
    await navigator.clipboard.writeText(text);
    button.textContent = "Copied";
    setTimeout(() => (button.textContent = "Copy"), 1500);
  });
  box.append(button);
  return box;
}

// ---- endpoints

function answers(responses) {
  const rows = Object.entries(responses || {}).flatMap(([status, given]) => {
    const response = resolve(given);
    const types = Object.keys(response.content || {}).join(", ");
    const row = make(
      "tr", "", cell("th", "row", make("code", "", status)), cell("td", "", make("span", "kind", types)),
      cell("td", "", ...paragraphs(response.description)),
    );
    const good = status.startsWith("2"); // all errors have the same fields, which are shown once, below
    return [row, ...more(good ? objectsIn((jsonOf(response.content) || {}).schema || {}) : [], "the answer", 1)];
  });
  const bad = Object.entries(responses || {}).find(([status]) => /^[45]/.test(status));
  const error = bad && objectsIn((jsonOf(resolve(bad[1]).content) || {}).schema || {})[0];
  return [table(["Status", "Content", "Meaning"], rows), ...(error ? [inside("an error", error, 1)] : [])];
}

function endpoint({ path, method, operation, id }) {
  const heading = make("h4", "", make("span", "method " + method, method.toUpperCase()), make("code", "", path));
  const box = make("section", "endpoint", heading);
  box.id = id;
  if (operation.summary) box.append(make("p", "", make("strong", "", ...prose(operation.summary))));
  box.append(...paragraphs(operation.description));
  const parameters = (operation.parameters || []).map(resolve);
  const section = (title, ...parts) => parts.length && box.append(make("h5", "", title), ...parts);
  if (parameters.length) {
    section("Parameters", fieldTable(parameters.map((one) => ({
      name: one.name, place: one.in, must: one.required, schema: { ...resolve(one.schema), description: one.description },
    }))));
  }
  section("Body", ...bodyTables(jsonOf(resolve(operation.requestBody).content)));
  section("Answers", ...answers(operation.responses));
  section("Example", curlBox(curl(path, method, operation)));
  return box;
}

function everyEndpoint() {
  const all = [];
  for (const [path, given] of Object.entries(spec.paths || {})) {
    const item = resolve(given);
    for (const method of METHODS.filter((one) => item[one])) {
      const operation = { ...item[method], parameters: [...(item.parameters || []), ...(item[method].parameters || [])] };
      all.push({ path, method, operation, tag: (operation.tags || [""])[0], id: method + path.replace(/\W+/g, "-") });
    }
  }
  return all;
}

function show() {
  const info = spec.info || {};
  document.title = (info.title || "Shoal") + ": the API";
  page.version.textContent = info.version || "";
  page.about.replaceChildren(...paragraphs(info.description));
  const all = everyEndpoint();
  page.contents.replaceChildren(...all.map(({ path, method, id }) => {
    const link = make("a", "", make("span", "method " + method, method.toUpperCase()), make("code", "", path));
    link.href = "#" + id;
    return link;
  }));
  const tags = [...new Set(all.map((one) => one.tag))];
  page.endpoints.replaceChildren(...tags.flatMap((tag) => [
    ...(tag ? [make("h3", "", tag)] : []),
    ...all.filter((one) => one.tag === tag).map(endpoint),
  ]));
  page.endpoints.setAttribute("aria-busy", "false");
  if (location.hash) document.getElementById(decodeURIComponent(location.hash.slice(1)))?.scrollIntoView();
}

// ---- fetching it

function stored(value) {
  try {
    if (value !== undefined) sessionStorage.setItem("shoal.key", value);
    return sessionStorage.getItem("shoal.key") || "";
  } catch {
    return value || "";
  }
}

async function load() {
  const key = page.key.value.trim();
  const response = await fetch("openapi.json", { headers: key ? { Authorization: "Bearer " + key } : {} });
  page.unlock.hidden = response.status !== 401;
  if (!response.ok) {
    const message = response.status === 401 ? "This server requires an API key." : "The server answered " + response.status + ".";
    throw new Error(message);
  }
  spec = await response.json();
  page.problem.hidden = true;
  show();
}

function tryLoad() {
  load().catch((error) => {
    page.problem.textContent = "The list of endpoints could not be read. " + error.message;
    page.problem.hidden = false;
  });
}

page.unlock.addEventListener("submit", (event) => {
  event.preventDefault();
  stored(page.key.value.trim());
  tryLoad();
});
page.key.value = stored();
tryLoad();
