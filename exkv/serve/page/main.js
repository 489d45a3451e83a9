// The page's entry point: index.html has the layout; here are the handlers of keys and buttons.
//
// chat.js has the conversation, store.js stores it, models.js loads another model, state.js shows
// memory and jobs, api.js talks to the server, markdown.js renders an answer's text.

import { onKeyWanted, useKey } from "./api.js";
import * as chat from "./chat.js";
import { $ } from "./elements.js";
import * as models from "./models.js";
import { refresh } from "./state.js";
import * as store from "./store.js";

function begin() {
  store.begin();
  chat.show();
  closePanes();
  $("say").focus();
}

// Sending ------------------------------------------------------------------------------------------

$("composer").onsubmit = (event) => {
  event.preventDefault();
  if (chat.say($("say").value)) $("say").value = "";
};
$("say").onkeydown = (event) => {
  if (chat.sends(event)) { event.preventDefault(); $("composer").requestSubmit(); }
};
$("stop").onclick = () => { chat.stop(); $("say").focus(); };
$("new").onclick = begin;

// Panes on narrow screens ------------------------------------------------------------------------------

const PANES = { "show-chats": "chats-pane", "show-state": "state-pane" };

function closePanes() {
  for (const [opener, pane] of Object.entries(PANES)) {
    $(pane).classList.remove("shown");
    $(opener).setAttribute("aria-expanded", "false");
  }
}
for (const [opener, pane] of Object.entries(PANES)) {
  $(opener).onclick = () => {
    const shown = $(pane).classList.contains("shown");
    closePanes();
    $(pane).classList.toggle("shown", !shown);
    $(opener).setAttribute("aria-expanded", String(!shown));
  };
}
for (const hide of document.querySelectorAll(".hide")) hide.onclick = closePanes;
document.querySelector("main").addEventListener("click", (event) => {
  if (!event.target.closest("header")) closePanes();
});
$("chats").addEventListener("click", (event) => { if (event.target.closest(".name")) closePanes(); });

// Keys ---------------------------------------------------------------------------------------------

const KEYS = {
  KeyN: begin,
  KeyM: () => models.open(),
  ArrowUp: () => chat.move(-1),
  ArrowDown: () => chat.move(1),
};
addEventListener("keydown", (event) => {
  if (document.querySelector("dialog[open]")) return;
  const typing = /^(TEXTAREA|INPUT|SELECT)$/.test(document.activeElement?.tagName);
  if (event.altKey && !event.ctrlKey && KEYS[event.code]) { event.preventDefault(); KEYS[event.code](); }
  else if (event.key === "/" && !typing) { event.preventDefault(); $("say").focus(); }
  else if (event.key === "Escape") { chat.stop(); closePanes(); }
});

// The key ------------------------------------------------------------------------------------------

onKeyWanted((wrong) => {
  $("key-wrong").hidden = !wrong;
  if (!$("key-dialog").open) $("key-dialog").showModal();
});
$("key-form").onsubmit = () => { useKey($("key").value.trim()); $("key").value = ""; refresh(); };

chat.begin();
models.begin();
chat.show();
refresh();
