// Conversations, kept in this browser: {id, messages: [{role, content, ...}], system, temperature,
// maxTokens}. Other tabs' changes come in as they are made.

const NAME = "exkv.chats";

let chats = read();
let current = chats[0];
export let lost = ""; // why the last change could not be kept

function read() {
  let found = [];
  try { found = JSON.parse(localStorage.getItem(NAME) || "[]"); } catch { /* damaged: begin anew */ }
  found = Array.isArray(found) ? found.filter((chat) => chat && Array.isArray(chat.messages)) : [];
  for (const chat of found) chat.id ||= crypto.randomUUID?.() ?? String(Math.random());
  return found.length ? found : [fresh()];
}

function fresh() {
  return { id: String(Date.now()) + Math.random().toString(36).slice(2), messages: [] };
}

export const all = () => chats;
export const shown = () => current;
export const title = (chat) => chat.messages[0]?.content.slice(0, 80) || "New conversation";

export function keep() {
  try {
    localStorage.setItem(NAME, JSON.stringify(chats.filter((chat) => chat.messages.length)));
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

export function drop(chat) {
  chats = chats.filter((each) => each !== chat);
  if (!chats.length) chats = [fresh()];
  if (current === chat) current = chats[0];
  keep();
}

/** Call back when another tab has changed conversations; those that are `busy` stay as here. */
export function onChange(busy, run) {
  addEventListener("storage", (event) => {
    if (event.key !== NAME || chats.some(busy)) return;
    const id = current.id;
    chats = read();
    current = chats.find((chat) => chat.id === id) || chats[0];
    run();
  });
}
