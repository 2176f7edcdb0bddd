// Making elements: every text is inserted as text, never as HTML. Knows nothing of OpenAPI.

export function make(tag, name, ...parts) {
  const made = document.createElement(tag);
  if (name) made.className = name;
  made.append(...parts.filter((part) => part !== null && part !== undefined && part !== ""));
  return made;
}

// `code` in a description is shown as code, an empty line begins a paragraph; no other markup
export function prose(text) {
  return String(text || "").split("`").map((part, at) => (at % 2 ? make("code", "", part) : part));
}

export function paragraphs(text) {
  return String(text || "").split(/\n\s*\n/).filter((part) => part.trim()).map((part) => make("p", "", ...prose(part.trim())));
}

export function button(text, act, name = "") {
  const made = make("button", name, text);
  made.type = "button";
  made.addEventListener("click", act);
  return made;
}

export function cell(tag, scope, ...parts) {
  const made = make(tag, "", ...parts);
  if (scope) made.scope = scope;
  return made;
}

export function table(heads, rows) {
  const head = make("thead", "", make("tr", "", ...heads.map((text) => cell("th", "col", text))));
  return make("div", "scroll", make("table", "", head, make("tbody", "", ...rows)));
}

// A closed section, whose content is made when it is first opened.
export function folded(name, summary, fill) {
  const box = make("details", name, summary);
  box.addEventListener("toggle", () => box.open && opened(box));
  fills.set(box, fill);
  return box;
}

const fills = new WeakMap();

export function opened(box) {
  box.open = true;
  const fill = fills.get(box);
  if (!fill) return;
  fills.delete(box);
  box.append(...fill());
}

// Code with a button that copies it.
export function codeBox(text) {
  const pre = make("pre", "", make("code", "", text));
  pre.tabIndex = 0; // it may scroll sideways
  const box = make("div", "code", pre);
  if (!navigator.clipboard) return box; // available only over https or from this machine
  const copy = button("Copy", async () => {
    await navigator.clipboard.writeText(text);
    copy.textContent = "Copied";
    setTimeout(() => (copy.textContent = "Copy"), 1500);
  });
  box.append(copy);
  return box;
}

// ---- tabs: a choice holds for all of them on the page

let count = 0;
const groups = new Set();
let chosen = "";

// `panes`: [name, element] each
export function tabs(label, panes) {
  const list = make("div", "tabs");
  list.setAttribute("role", "tablist");
  list.setAttribute("aria-label", label);
  const all = panes.map(([name, pane]) => {
    count += 1;
    const tab = button(name, () => choose(name));
    tab.id = "tab-" + count;
    pane.id = "pane-" + count;
    for (const [key, value] of [["role", "tab"], ["aria-controls", pane.id]]) tab.setAttribute(key, value);
    for (const [key, value] of [["role", "tabpanel"], ["aria-labelledby", tab.id]]) pane.setAttribute(key, value);
    list.append(tab);
    return { name, tab, pane };
  });
  list.addEventListener("keydown", (event) => {
    const step = { ArrowRight: 1, ArrowLeft: -1 }[event.key];
    if (!step) return;
    const at = all.findIndex((one) => one.tab === document.activeElement);
    const next = all[(at + step + all.length) % all.length];
    choose(next.name);
    next.tab.focus();
  });
  groups.add(all);
  select(all, chosen);
  return [list, ...panes.map(([, pane]) => pane)];
}

function choose(name) {
  chosen = name;
  for (const all of groups) select(all, name);
}

function select(all, name) {
  const wanted = all.find((one) => one.name === name) || all[0];
  for (const one of all) {
    const on = one === wanted;
    one.tab.setAttribute("aria-selected", String(on));
    one.tab.tabIndex = on ? 0 : -1;
    one.pane.hidden = !on;
  }
}
