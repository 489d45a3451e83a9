// Conversations in localStorage, one key each: {id, version, begun, messages: [{role, content,
// ...}], system, temperature, maxTokens}. A tab writes only the conversation that it changed, and
// follows the changes of other tabs. If two tabs change one at once, both versions are kept.

const PREFIX = "exkv.chat.";
const OLD = "exkv.chats"; // the former format: all conversations in one list

let chats = readAll();
let current = chats[0];
export let lost = ""; // why the last change could not be stored

function identity() { return String(Date.now()) + Math.random().toString(36).slice(2); }

function fresh() {
  return { id: identity(), begun: Date.now(), messages: [] };
}

/** A stored conversation without damaged messages; null if it is invalid. */
function valid(chat) {
  if (typeof chat?.id !== "string" || !Array.isArray(chat.messages)) return null;
  chat.messages = chat.messages.filter((each) => typeof each?.role === "string" && typeof each.content === "string");
  return chat.messages.length ? chat : null;
}

function parsed(text) {
  try { return JSON.parse(text); } catch { return null; }
}

function readAll() {
  splitList();
  const keys = Object.keys(localStorage).filter((key) => key.startsWith(PREFIX));
  const found = keys.map((key) => valid(parsed(localStorage.getItem(key)))).filter(Boolean);
  return found.length ? ordered(found) : [fresh()];
}

function ordered(found) { return found.sort((a, b) => (b.begun || 0) - (a.begun || 0)); }

/** Migrate the former list to one key per conversation. */
function splitList() {
  const old = parsed(localStorage.getItem(OLD));
  if (!Array.isArray(old)) return;
  localStorage.removeItem(OLD); // first: there may be no room for both
  old.forEach((chat, index) => {
    const made = valid({ ...chat, id: chat?.id || identity(), begun: Date.now() - index });
    if (made) localStorage.setItem(PREFIX + made.id, JSON.stringify(made));
  });
}

export const all = () => chats;
export const shown = () => current;
export const title = (chat) => chat.messages[0]?.content.slice(0, 80) || "New conversation";

/** Store a conversation; under a new key if another tab has changed it since. */
export function keep(chat) {
  if (!chat.messages.length || !chats.includes(chat)) return;
  try {
    const stored = valid(parsed(localStorage.getItem(PREFIX + chat.id)));
    if (stored && stored.version !== chat.version) {
      Object.assign(chat, { id: identity(), begun: Date.now() });
      chats = ordered([stored, ...chats]);
    }
    chat.version = identity();
    localStorage.setItem(PREFIX + chat.id, JSON.stringify(chat));
    lost = "";
  } catch (error) {
    lost = "This browser's storage is full: delete a conversation. " + error.message;
  }
}

export function select(chat) { current = chat; }

/** Show an empty conversation, made if there is none. */
export function begin() {
  current = chats.find((chat) => !chat.messages.length);
  if (!current) chats.unshift(current = fresh());
}

/** Truncate a conversation to its first `count` messages; returns a copy instead if messages after
 * the one at `replaced` would be lost. */
export function cut(chat, count, replaced) {
  if (chat.messages.length > replaced + 1) {
    const { system, temperature, maxTokens } = chat;
    current = { ...fresh(), system, temperature, maxTokens, messages: chat.messages.slice(0, count) };
    chats.unshift(current);
    return current;
  }
  chat.messages.splice(count);
  return chat;
}

export function drop(chat) {
  localStorage.removeItem(PREFIX + chat.id);
  forget(chat);
}

function forget(chat) {
  chats = chats.filter((each) => each !== chat);
  if (!chats.length) chats = [fresh()];
  if (current === chat) current = chats[0];
}

/** Call back when another tab has changed a conversation; `busy` ones are left alone. */
export function onChange(busy, run) {
  addEventListener("storage", ({ key, newValue }) => {
    if (!key?.startsWith(PREFIX)) return;
    const here = chats.find((chat) => PREFIX + chat.id === key), theirs = valid(parsed(newValue));
    if (here && busy(here)) return;
    if (here && newValue === null) {
      const wasShown = here === current;
      forget(here);
      if (wasShown) begin(); // further typing must not go to another conversation
    } else if (here && theirs) {
      for (const name of Object.keys(here)) delete here[name];
      Object.assign(here, theirs);
    } else if (theirs) {
      chats = ordered([theirs, ...chats]);
    }
    run();
  });
}
