// Reading OpenAPI 3: references, types, fields, limits, meanings and examples. Knows no page and no endpoint.

const DEPTH = 4; // of fields within fields; a schema may contain itself
const HUGE = 2 ** 31 - 1; // larger limits are not shown
let spec = {};

export function read(document) {
  spec = document;
}

export function resolve(thing) {
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

export function kind(given, depth = 0) {
  const schema = resolve(given);
  const deeper = (one) => (depth < DEPTH ? kind(one, depth + 1) : "…");
  if (schema.const !== undefined) return JSON.stringify(schema.const);
  if (schema.enum) return schema.enum.map((value) => JSON.stringify(value)).join(" or ");
  if (choices(schema).length) return [...new Set(choices(schema).map(deeper))].join(" or ");
  const types = [].concat(schema.type || (fields(schema).length ? "object" : "anything"));
  return types.map((type) => (type === "array" && schema.items ? "list of " + deeper(schema.items) : type)).join(" or ");
}

export function fields(given) {
  const schema = resolve(given);
  const inherited = (schema.allOf || []).flatMap(fields);
  const must = new Set(schema.required || []);
  return inherited.concat(
    Object.entries(schema.properties || {}).map(([name, value]) => ({ name, schema: value, must: must.has(name) })),
  );
}

// the nested objects of a field: its own, those of its items and of its alternatives
export function objectsIn(given, depth = 0) {
  const schema = resolve(given);
  if (fields(schema).length) return [schema];
  if (depth > DEPTH) return [];
  return [...choices(schema), ...(schema.items ? [schema.items] : [])].flatMap((one) => objectsIn(one, depth + 1));
}

export function limits(given) {
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

// what is said about a field itself; else about its type, unless that has fields, which are shown with it
export function meaning(given) {
  const schema = resolve(given);
  const said = [schema.description, ...choices(schema).map((one) => one.description)];
  return given.description || (fields(schema).length ? "" : said.find((text) => text) || "");
}

// of other servers' APIs: taken, and without effect here
export function hasNoEffect(given) {
  return Boolean(given["x-no-effect"]);
}

export function exampleOf(given, depth = 0) {
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

export function bodyExample(media) {
  const named = Object.values(media.examples || {}).map((one) => resolve(one).value)[0];
  return media.example ?? named ?? exampleOf(media.schema || {});
}

export function jsonOf(content) {
  const types = Object.keys(content || {});
  return (content || {})[types.find((type) => type.includes("json")) || types[0]];
}

export function needsKey(operation) {
  return (operation.security || spec.security || []).some((one) => Object.keys(one).length);
}
