// Conversations, kept in this browser under a key each: {id, version, begun, messages: [{role,
// content, ...}], system, temperature, maxTokens}. A tab writes only the conversation that it
// changed, and takes over what other tabs write. Of one that two tabs changed at once both stay.

const PREFIX = "exkv.chat.";
const OLD = "exkv.chats"; // all of them in one list, before they had keys

let chats = readAll();
let current = chats[0];
export let lost = ""; // why the last change could not be kept

function identity() { return String(Date.now()) + Math.random().toString(36).slice(2); }

function fresh() {
  return { id: identity(), begun: Date.now(), messages: [] };
}

/** A conversation that was stored, without what is damaged of it; null where it is none. */
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

/** Give the conversations of the old list a key each. */
function splitList() {
  const old = parsed(localStorage.getItem(OLD));
  if (!Array.isArray(old)) return;
  localStorage.removeItem(OLD); // first, since there may be no room for both
  old.forEach((chat, index) => {
    const made = valid({ ...chat, id: chat?.id || identity(), begun: Date.now() - index });
    if (made) localStorage.setItem(PREFIX + made.id, JSON.stringify(made));
  });
}

export const all = () => chats;
export const shown = () => current;
export const title = (chat) => chat.messages[0]?.content.slice(0, 80) || "New conversation";

/** Store a conversation; under a new key where another tab has changed it since. */
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
    lost = "This browser keeps no more: delete a conversation. " + error.message;
  }
}

export function select(chat) { current = chat; }

/** A conversation without messages, made if there is none. */
export function begin() {
  current = chats.find((chat) => !chat.messages.length);
  if (!current) chats.unshift(current = fresh());
}

/** Go on from a conversation's first `count` messages: in a copy, where more would be lost than
 * those up to the one at `replaced`. */
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

/** Call back when another tab has changed a conversation; those that are `busy` stay as here. */
export function onChange(busy, run) {
  addEventListener("storage", ({ key, newValue }) => {
    if (!key?.startsWith(PREFIX)) return;
    const here = chats.find((chat) => PREFIX + chat.id === key), theirs = valid(parsed(newValue));
    if (here && busy(here)) return;
    if (here && newValue === null) {
      const wasShown = here === current;
      forget(here);
      if (wasShown) begin(); // what is typed next must not go to another conversation
    } else if (here && theirs) {
      for (const name of Object.keys(here)) delete here[name];
      Object.assign(here, theirs);
    } else if (theirs) {
      chats = ordered([theirs, ...chats]);
    }
    run();
  });
}
