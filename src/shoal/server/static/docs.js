// The API page: reads openapi.json and renders it, closed; a section is made when it is opened. Knows OpenAPI 3 and nothing
// of Shoal's endpoints.

import { cell, folded, make, opened, paragraphs, prose, table } from "./docs-page.js";
import { fields, hasNoEffect, jsonOf, kind, limits, meaning, objectsIn, read, resolve } from "./docs-schema.js";
import { examples, tryIt } from "./docs-try.js";

const page = {};
for (const part of document.querySelectorAll("[id]")) page[part.id] = part;

const METHODS = ["get", "post", "put", "patch", "delete", "head", "options"];
const DEPTH = 4; // of fields within fields; a schema may contain itself

// ---- fields

function fieldTable(list, depth = 0) {
  const sorted = [...list.filter((field) => field.must), ...list.filter((field) => !field.must)];
  const plain = sorted.filter(({ schema }) => !hasNoEffect(schema));
  const others = sorted.filter(({ schema }) => hasNoEffect(schema));
  const made = (some) => table(["Field", "Type", "Meaning"], some.flatMap((field) => fieldRows(field, depth)));
  if (!others.length) return [made(plain)];
  const title = make("summary", "", others.length + " more that other servers have, without effect here");
  return [made(plain), folded("", title, () => [made(others)])];
}

function fieldRows({ name, schema, must, place }, depth) {
  const told = paragraphs(meaning(schema));
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
  const about = schema.description ? paragraphs(schema.description) : [];
  return folded("", make("summary", "", title), () => [...about, ...fieldTable(fields(schema), depth)]);
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

function endpoint(one) {
  const { path, method, operation, id } = one;
  const heading = make("h4", "", make("span", "method " + method, method.toUpperCase()), make("code", "", path));
  const summary = make("summary", "", heading, make("span", "about", ...prose(operation.summary)));
  const box = folded("endpoint", summary, () => inner(one));
  box.id = id;
  return box;
}

function inner(one) {
  const { operation, parameters } = one;
  const body = objectsIn((jsonOf(resolve(operation.requestBody).content) || {}).schema || {});
  const part = (title, ...parts) => (parts.length ? [make("h5", "", title), ...parts] : []);
  const fold = (title, count, fill) => (count ? [folded("part", make("summary", "", title), fill)] : []);
  const places = parameters.map((given) => ({
    name: given.name, place: given.in, must: given.required,
    schema: { ...resolve(given.schema), description: given.description },
  }));
  return [
    ...paragraphs(operation.description),
    ...part("Example", ...examples(one)),
    ...fold("Try it", 1, () => [tryIt(one, () => page.key.value.trim(), () => (page.unlock.hidden = false))]),
    ...fold("Parameters", places.length, () => fieldTable(places)),
    ...fold("Fields of the body", body.length, () => body.flatMap((schema) => fieldTable(fields(schema)))),
    ...fold("Answers", 1, () => answers(operation.responses)),
  ];
}

function everyEndpoint(spec) {
  const all = [];
  for (const [path, given] of Object.entries(spec.paths || {})) {
    const item = resolve(given);
    for (const method of METHODS.filter((one) => item[one])) {
      const operation = item[method];
      const parameters = [...(item.parameters || []), ...(operation.parameters || [])].map(resolve);
      const tag = (operation.tags || [""])[0];
      all.push({ path, method, operation, parameters, tag, id: method + path.replace(/\W+/g, "-") });
    }
  }
  return all;
}

function show(spec) {
  read(spec);
  const info = spec.info || {};
  document.title = (info.title || "Shoal") + ": the API";
  page.version.textContent = info.version || "";
  page.about.replaceChildren(...paragraphs(info.description));
  const all = everyEndpoint(spec);
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
  goTo();
}

// the endpoint that the address names
function goTo() {
  const box = location.hash && document.getElementById(decodeURIComponent(location.hash.slice(1)));
  if (!box || !box.matches("details")) return;
  opened(box);
  box.scrollIntoView();
}

addEventListener("hashchange", goTo);

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
  show(await response.json());
  page.problem.hidden = true;
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
