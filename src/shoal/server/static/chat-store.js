// Conversations and settings, kept in this browser alone. The API key is kept for this tab only. Where a browser keeps
// nothing, they last as long as the page.

const PREFIX = "shoal.chat.";
const MOST = 200; // conversations; the oldest are dropped

export class Store {
  constructor() {
    this.memory = new Map();
    try {
      localStorage.getItem("shoal");
      this.disk = localStorage;
    } catch {
      this.disk = null;
    }
  }

  get(name) {
    return this.memory.get(name) ?? (this.disk ? this.disk.getItem(name) : null);
  }

  set(name, value) {
    try {
      if (!this.disk) throw new Error("nothing is kept");
      this.disk.setItem(name, value);
      this.memory.delete(name);
    } catch {
      this.memory.set(name, value);
    }
  }

  remove(name) {
    this.memory.delete(name);
    if (this.disk) this.disk.removeItem(name);
  }

  // The newest first.
  chats() {
    const names = new Set(this.memory.keys());
    for (let at = 0; this.disk && at < this.disk.length; at += 1) names.add(this.disk.key(at));
    const found = [...names].filter((name) => name.startsWith(PREFIX)).map((name) => this.chat(name.slice(PREFIX.length)));
    return found.filter(Boolean).sort((one, other) => other.updated - one.updated);
  }

  chat(id) {
    try {
      const found = JSON.parse(this.get(PREFIX + id));
      return found && Array.isArray(found.messages) ? found : null;
    } catch {
      return null;
    }
  }

  save(chat) {
    chat.updated = Date.now();
    this.set(PREFIX + chat.id, JSON.stringify(chat));
    for (const old of this.chats().slice(MOST)) this.forget(old.id);
  }

  forget(id) {
    this.remove(PREFIX + id);
  }
}

export function newChat() {
  const id = Array.from(crypto.getRandomValues(new Uint8Array(9)), (part) => part.toString(36)).join("");
  return { id, title: "", updated: 0, messages: [] };
}

export function titleOf(chat) {
  if (chat.title) return chat.title;
  const asked = chat.messages.find((message) => message.role === "user");
  return asked ? asked.content.trim().replace(/\s+/g, " ").slice(0, 60) : "New chat";
}

// What stands in the fields of the settings; the key goes to the tab's own storage.
export function keepFields(store, fields) {
  for (const [name, field] of Object.entries(fields)) {
    if (name !== "key") store.set("shoal." + name, field.value);
    else try { sessionStorage.setItem("shoal.key", field.value); } catch { /* it lasts as long as the page */ }
  }
}

export function recallFields(store, fields) {
  for (const [name, field] of Object.entries(fields)) {
    if (name !== "key") field.value = store.get("shoal." + name) ?? field.value;
    else try { field.value = sessionStorage.getItem("shoal.key") ?? ""; } catch { /* as above */ }
  }
}
