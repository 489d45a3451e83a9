// The dialog that loads another model; it shows the plan first.

import { events, get, post } from "./api.js";
import { device } from "./bars.js";
import { $, make } from "./elements.js";
import { refresh, state } from "./state.js";

let asked = 0; // number of the newest plan request
let timer = 0;
let planned = null; // the plan shown

/** Open the dialog, with the models in the folder. */
export async function open() {
  $("models").showModal();
  $("plan").replaceChildren();
  try {
    const names = (await get("v1/models")).data.map((model) => model.id);
    const chosen = $("which").value || state?.model;
    $("which").replaceChildren(...names.map((name) => make("option", { selected: name === chosen }, name)));
    plan();
  } catch (error) { said(error.message, "error"); }
}

function options() {
  const length = $("length").value.trim();
  const given = { cache: $("cache").value, weights: $("weights").value, max_seq_len: length };
  return Object.fromEntries(Object.entries(given).filter(([, value]) => value));
}

/** Show the plan of the current choice; only a plan that fits can be loaded. */
async function plan() {
  const mine = ++asked;
  $("load").disabled = true;
  if (!$("which").value) return said("No model can be loaded: start `exkv serve` with --model-dir FOLDER.");
  if (!$("length").checkValidity()) return said("Tokens are a whole number, or max.", "error");
  try {
    const answer = await get("v1/plan?" + new URLSearchParams({ model: $("which").value, ...options() }));
    if (mine !== asked) return;
    planned = answer;
    $("plan").replaceChildren(...drawn(answer));
    $("load").disabled = !answer.fits || !$("loading").hidden;
  } catch (error) {
    if (mine === asked) said(error.message, "error");
  }
}

function drawn(answer) {
  const bars = Object.values(answer.plans)[0].ledgers.map(({ budget, ...ledger }) => device(budget.device, [
    ["others", "others and this process", budget.in_use + budget.in_use_by_others],
    ["weights", "weights", ledger.weights],
    ["cache", "cache", ledger.cache],
    ["calls", "for calls", ledger.workspace + ledger.logits],
    ["others", "left free", budget.reserve + budget.margin],
  ], budget.capacity < 2 ** 60 ? budget.capacity : 0));
  const tokens = make("small", {}, `${answer.asked.max_seq_len.toLocaleString("en")} tokens, ${answer.asked.cache} cache`);
  const words = make("p", { className: answer.fits ? "" : "error" }, answer.answer);
  const remedies = answer.would_fit.map((remedy) => make("li", {}, remedy));
  return [tokens, ...bars, words, ...(remedies.length ? [make("p", {}, "Would fit:"), make("ul", {}, ...remedies)] : [])];
}

function said(text, className = "") {
  $("plan").replaceChildren(make("p", { className }, text));
}

async function load() {
  const name = $("which").value, bar = $("loading");
  const { max_seq_len: length, ...rest } = options();
  const tokens = length === "max" ? planned.asked.max_seq_len : Number(length) || undefined;
  bar.hidden = false;
  bar.removeAttribute("value");
  $("load").disabled = $("unload").disabled = true;
  refresh();
  try {
    for await (const step of events("v1/model/load", { model_name: name, max_seq_len: tokens, ...rest })) {
      bar.max = step.modules;
      bar.value = step.module;
    }
    $("models").close();
  } catch (error) {
    said(error.message, "error");
  }
  bar.hidden = true;
  $("unload").disabled = false;
  refresh();
}

async function unload() {
  $("unload").disabled = true;
  try {
    await post("v1/model/unload", {});
    plan();
  } catch (error) { said(error.message, "error"); }
  $("unload").disabled = false;
  refresh();
}

export function begin() {
  for (const id of ["which", "cache", "weights"]) $(id).onchange = plan;
  $("length").oninput = () => { clearTimeout(timer); timer = setTimeout(plan, 400); };
  $("load").onclick = load;
  $("unload").onclick = unload;
  $("model").onclick = open;
}
