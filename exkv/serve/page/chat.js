// The conversation shown: its messages, their actions, and streamed answers.

import { events } from "./api.js";
import { $, button, copy, counted, make } from "./elements.js";
import { rendered } from "./markdown.js";
import { refresh } from "./state.js";
import * as store from "./store.js";

const writing = new Map(); // conversation -> AbortController of its answer
const busy = (chat) => writing.has(chat);
const drafts = new Map(); // conversation -> unsent text
let before = null; // the conversation shown before

// Rendering ----------------------------------------------------------------------------------------

export function show() {
  const chat = store.shown();
  if (chat !== before) {
    drafts.set(before, $("say").value);
    $("say").value = drafts.get(chat) || "";
    before = chat;
  }
  $("log").replaceChildren(...chat.messages.map((message, index) => turn(chat, message, index)));
  $("system").value = chat.system || "";
  $("temperature").value = chat.temperature ?? "";
  $("max-tokens").value = chat.maxTokens ?? "";
  $("send").hidden = busy(chat);
  $("stop").hidden = !busy(chat);
  $("notice").hidden = !store.lost;
  $("notice").textContent = store.lost;
  showList();
  toEnd();
}

function showList() {
  $("chats").replaceChildren(...store.all().map((chat) => {
    const title = store.title(chat);
    const open = button(title, () => { store.select(chat); show(); $("say").focus(); }, { className: "name" + (busy(chat) ? " writing" : "") });
    if (chat === store.shown()) open.setAttribute("aria-current", "true");
    const drop = button("×", () => remove(chat), { title: "Delete", "aria-label": "Delete " + title });
    return make("li", {}, open, drop);
  }));
}

function remove(chat) {
  if (chat.messages.length && !confirm(`Delete "${store.title(chat)}"?`)) return;
  writing.get(chat)?.abort();
  store.drop(chat);
  show();
}

function turn(chat, message, index) {
  const last = index === chat.messages.length - 1;
  const box = make("div", { className: `turn ${message.role === "user" ? "user" : "assistant"}` }, make("div", { className: "text" }));
  write(box, message);
  if (last && busy(chat)) box.classList.add("writing");
  else box.append(actions(chat, message, index, box));
  return box;
}

function actions(chat, message, index, box) {
  const nav = make("nav", {}, button("copy", () => copy(message.content)));
  if (message.role === "user") nav.append(button("edit", () => edit(chat, index, box)));
  else nav.append(button("again", () => again(chat, index)));
  if (message.note) nav.append(make("span", {}, message.note));
  return nav;
}

function write(box, message) {
  const text = box.firstChild;
  if (message.role === "user") { text.textContent = message.content; return; }
  const chosen = text.querySelector("details")?.dataset.chosen;
  text.replaceChildren(...rendered(message.content));
  if (message.reasoning) text.prepend(reasoning(message, chosen));
  if (message.error) text.append(make("p", { className: "error" }, message.error));
}

/** What came before an answer: open until that begins, unless it was opened or closed by hand. */
function reasoning(message, chosen) {
  const box = make("details", { open: chosen ? chosen === "open" : !message.content }, make("summary", {}, "reasoning"), message.reasoning);
  if (chosen) box.dataset.chosen = chosen;
  box.firstChild.onclick = () => { box.dataset.chosen = box.open ? "closed" : "open"; };
  return box;
}

function toEnd() { $("log").scrollTop = $("log").scrollHeight; }
const atEnd = () => $("log").scrollHeight - $("log").scrollTop - $("log").clientHeight < 100;

// Actions ------------------------------------------------------------------------------------------

export function say(content) {
  const chat = store.shown();
  if (!content.trim() || busy(chat)) return false;
  chat.messages.push({ role: "user", content: content.trim() });
  answer(chat);
  return true;
}

export function stop() { writing.get(store.shown())?.abort(); }

export function move(step) {
  const chats = store.all();
  const at = chats.indexOf(store.shown()) + step;
  if (at >= 0 && at < chats.length) { store.select(chats[at]); show(); }
}

/** Regenerate an answer; in a copy of the conversation if more messages follow. */
function again(chat, index) {
  if (busy(chat)) return;
  answer(store.cut(chat, index, index));
}

/** Edit a message in place and answer it again; in a copy of the conversation if more messages
 * follow than its answer. */
function edit(chat, index, box) {
  if (busy(chat)) return;
  const text = make("textarea", { value: chat.messages[index].content, "aria-label": "Message" });
  const send = () => {
    if (!text.value.trim() || busy(chat)) return;
    store.select(store.cut(chat, index, index + 1));
    say(text.value);
  };
  text.onkeydown = (event) => {
    if (event.key === "Escape") { event.stopPropagation(); show(); }
    if (sends(event)) { event.preventDefault(); send(); }
  };
  box.replaceChildren(text, make("nav", {}, button("send", send), button("cancel", show)));
  text.focus();
}

export const sends = (event) => event.key === "Enter" && !event.shiftKey && !event.isComposing;

// Answers ------------------------------------------------------------------------------------------

async function answer(chat) {
  const body = request(chat), message = { role: "assistant", content: "" }, stopping = new AbortController();
  chat.messages.push(message);
  writing.set(chat, stopping);
  store.keep(chat);
  show();
  refresh();
  const saving = setInterval(() => store.keep(chat), 2000); // in case the tab is closed
  try {
    message.note = await stream(chat, message, body, stopping.signal);
  } catch (error) {
    if (error.name === "AbortError") message.note = "stopped";
    else message.error = error.message;
  }
  clearInterval(saving);
  writing.delete(chat);
  store.keep(chat);
  if (chat === store.shown()) finished(chat); else showList();
  refresh();
}

/** Render a finished answer; keeps the scroll position unless it is at the end. */
function finished(chat) {
  const followed = atEnd(), top = $("log").scrollTop;
  show();
  if (!followed) $("log").scrollTop = top;
}

function request(chat) {
  const messages = chat.messages.filter((each) => !each.error || each.content).map(({ role, content }) => ({ role, content }));
  if (chat.system) messages.unshift({ role: "system", content: chat.system });
  const body = { messages, stream: true, stream_options: { include_usage: true } };
  if (chat.temperature != null) body.temperature = chat.temperature;
  if (chat.maxTokens != null) body.max_tokens = chat.maxTokens;
  return body;
}

/** Append an answer's stream to the message -> a note on its length and speed. */
async function stream(chat, message, body, signal) {
  let first = 0, reason = "", tokens = 0, waiting = false;
  const draw = () => {
    waiting = false;
    const box = $("log").lastElementChild;
    if (chat !== store.shown() || !box?.classList.contains("writing")) return;
    const followed = atEnd();
    write(box, message);
    if (followed) toEnd();
  };
  for await (const part of events("v1/chat/completions", body, signal)) {
    const choice = part.choices[0];
    const text = choice?.delta.content || "", thought = choice?.delta.reasoning_content || "";
    if ((text || thought) && !first) {
      first = performance.now();
      refresh(); // the job is running now
    }
    message.content += text;
    if (thought) message.reasoning = (message.reasoning || "") + thought;
    reason = choice?.finish_reason || reason;
    tokens = part.usage?.completion_tokens || tokens;
    if ((text || thought) && !waiting) { waiting = true; setTimeout(draw, 30); }
  }
  const seconds = (performance.now() - first) / 1000;
  const speed = tokens > 1 && seconds > 0 ? `, ${((tokens - 1) / seconds).toFixed(0)} tokens/s` : "";
  return counted(tokens, "token") + speed + (reason === "length" ? ", cut at the limit" : "");
}

// Settings of the conversation ----------------------------------------------------------------------

export function begin() {
  const number = (id) => ($(id).value === "" || !$(id).checkValidity() ? undefined : Number($(id).value));
  const changed = () => {
    Object.assign(store.shown(), { system: $("system").value.trim() || undefined, temperature: number("temperature"), maxTokens: number("max-tokens") });
    store.keep(store.shown());
  };
  for (const id of ["system", "temperature", "max-tokens"]) $(id).onchange = changed;
  store.onChange(busy, show);
  addEventListener("pagehide", () => writing.forEach((_, chat) => store.keep(chat)));
}
