// Markdown as nodes of the page. Only a few tags survive; HTML in an answer is shown as text, images become links, so
// that no answer can run a script or load something from elsewhere. Uses marked and DOMPurify, the vendored libraries.

const TAGS = ["a", "p", "br", "strong", "em", "del", "code", "pre", "blockquote", "ul", "ol", "li", "hr"];
TAGS.push("h3", "h4", "h5", "h6", "table", "thead", "tbody", "tr", "th", "td");
const KEPT = {
  ALLOWED_TAGS: TAGS,
  ALLOWED_ATTR: ["href", "start"],
  ALLOWED_URI_REGEXP: /^(?:https?|mailto):/i,
  RETURN_DOM_FRAGMENT: true,
};
const SIGNS = { "&": "&amp;", "<": "&lt;", ">": "&gt;", '"': "&quot;", "'": "&#39;" };

const escaped = (text) => text.replace(/[&<>"']/g, (sign) => SIGNS[sign]);

const reader = new globalThis.marked.Marked({ gfm: true, breaks: true });
reader.use({
  renderer: {
    html: ({ text }) => escaped(text),
    image: ({ href, text }) => `<a href="${escaped(href)}">${escaped(text || href)}</a>`,
    checkbox: ({ checked }) => (checked ? "☑ " : "☐ "),
    heading({ tokens, depth }) { // below the headings of the page itself
      const tag = "h" + Math.min(6, depth + 2);
      return `<${tag}>${this.parser.parseInline(tokens)}</${tag}>`;
    },
  },
});
globalThis.DOMPurify.addHook("afterSanitizeAttributes", (node) => {
  if (node.tagName === "A") {
    node.setAttribute("target", "_blank");
    node.setAttribute("rel", "noopener noreferrer nofollow");
  }
});

// An element with a text.
export function line(tag, text, name) {
  const made = document.createElement(tag);
  made.textContent = text;
  if (name) made.className = name;
  return made;
}

// A button that does something, or says in a word that it has been done.
export function button(text, label, act) {
  const made = line("button", text);
  made.type = "button";
  if (label) made.setAttribute("aria-label", label);
  made.addEventListener("click", act);
  return made;
}

export function copyButton(label, text) {
  const made = button("Copy", label, async () => {
    made.textContent = (await copy(text())) ? "Copied" : "Not allowed";
    setTimeout(() => { made.textContent = "Copy"; }, 1500);
  });
  made.classList.add("copy");
  return made;
}

export async function copy(text) {
  try {
    await navigator.clipboard.writeText(text);
    return true;
  } catch { /* plain http from another machine: there is no clipboard; the old way */ }
  const box = document.createElement("textarea");
  box.value = text;
  box.className = "unseen";
  document.body.append(box);
  box.select();
  const done = document.execCommand("copy");
  box.remove();
  return done;
}

function codeBlock(token) {
  const box = document.createElement("div");
  box.className = "code";
  const head = document.createElement("div");
  const language = (token.lang || "").split(/\s/)[0].slice(0, 30);
  head.append(line("span", language || "text", "language"), copyButton("Copy this code", () => token.text));
  const pre = document.createElement("pre");
  pre.tabIndex = 0; // it may scroll
  pre.setAttribute("aria-label", language ? language + " code" : "Code");
  pre.setAttribute("role", "region");
  pre.append(line("code", token.text));
  box.append(head, pre);
  return box;
}

// Exactly one element for each block of the text.
function block(token) {
  if (token.type === "code") return codeBlock(token);
  const made = globalThis.DOMPurify.sanitize(reader.parser([token]).trim(), KEPT);
  for (const pre of made.querySelectorAll("pre")) pre.tabIndex = 0;
  if (made.childElementCount === 1 && made.childNodes.length === 1 && token.type !== "table") return made.firstChild;
  const box = document.createElement("div");
  if (token.type === "table") {
    box.className = "wide";
    box.tabIndex = 0;
    box.setAttribute("role", "region");
    box.setAttribute("aria-label", "Table");
  }
  box.append(made);
  return box;
}

// A text in a box. As it grows, blocks that have not changed stay as they are: a selection in them does, too.
export class MarkdownView {
  constructor(box) {
    this.box = box;
    this.raw = [];
  }

  show(text) {
    const tokens = reader.lexer(text).filter((token) => token.type !== "space" && token.type !== "def");
    let same = 0;
    while (same < tokens.length && this.raw[same] === tokens[same].raw) same += 1;
    while (this.box.childElementCount > same) this.box.lastElementChild.remove();
    this.box.append(...tokens.slice(same).map(block));
    this.raw = tokens.map((token) => token.raw);
  }
}
