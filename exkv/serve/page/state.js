// What is where, and what is going on: asked for every second or two, while somebody looks.

import { get } from "./api.js";
import { bar, device } from "./bars.js";
import { $, counted, make } from "./elements.js";

let before = null;
let timer = 0;
export let state = null;

/** Look now, and go on looking. */
export async function refresh() {
  clearTimeout(timer);
  try {
    if (document.visibilityState === "visible") show(state = await get("v1/state"));
  } catch (error) {
    $("model").textContent = "exkv";
    $("devices").replaceChildren(make("small", {}, error instanceof TypeError ? "The server is not there." : error.message));
    $("jobs").replaceChildren();
  }
  clearTimeout(timer); // of another look that began meanwhile
  timer = setTimeout(refresh, state?.jobs || state?.loading ? 1000 : 3000);
}
document.addEventListener("visibilitychange", () => document.visibilityState === "visible" && refresh());

function show(state) {
  const name = state.model || (state.loading ? "loading…" : "no model");
  $("model").textContent = name;
  document.title = state.model ? `${name} - exkv` : "exkv";
  const bars = state.devices.map((each) => device(each.device, parts(each, state.pages), each.of, "the rest"));
  $("devices").replaceChildren(...bars, ...inHost(state.host), ...pagesAlone(state));
  $("jobs").replaceChildren(...jobs(state));
}

/** A device's bytes. Its part of the pages is used as all of them are. */
function parts(each, pages) {
  const share = (count) => pages.total ? each.cache * count / pages.total : 0;
  const held = pages.total - pages.available, shared = pages.shared || 0;
  return [
    ["weights", "weights", each.weights],
    ["used", "pages in use", share(held - shared)],
    ["shared", "shared by several", share(shared)],
    ["known", "kept for later", share(pages.known)],
    ["pages", "pages free", share(pages.available - pages.known)],
    ["calls", "for calls", each.workspace],
  ];
}

/** What lies in host memory beside the devices: jobs that had to leave, and pages kept for later. */
function inHost(host) {
  if (!host || !(host.jobs || host.pages_room)) return [];
  const away = `${counted(host.jobs, "job")} put away`;
  const found = device("In host memory", [
    ["put-away", away, host.jobs_bytes],
    ["known", "pages kept for later", host.pages],
    ["pages", "room for pages", host.pages_room - host.pages],
  ], 0);
  found.id = "host";
  return [found];
}

/** The pages by themselves: beside a device they may be too little to be seen. */
function pagesAlone(state) {
  const { total, available, known, shared } = state.pages;
  if (!total) return [make("small", {}, state.loading ? `Loading: ${state.loading[0]} of ${state.loading[1]}` : "")];
  const held = total - available, inHost = state.running.filter((job) => job.in_host_memory).length;
  const words = `${held} of ${total} in use` + (shared ? `, ${shared} shared` : "") + `, ${known} kept for later` +
    (inHost ? `; ${counted(inHost, "job")} in host memory` : "");
  const pieces = [["used", "in use", held - shared], ["shared", "shared", shared], ["known", "kept for later", known], ["pages", "free", available - known]];
  const drawn = bar(`Pages: ${words}`, pieces.map(([kind, what, count]) => [kind, `${what}: ${count}`, count / total]));
  return [make("div", { className: "device", id: "pages" }, make("strong", {}, "Pages"), drawn, make("small", {}, words))];
}

function jobs(state) {
  const now = performance.now();
  const speed = before ? (state.generated_tokens - before.tokens) / (now - before.now) * 1000 : 0;
  before = { tokens: state.generated_tokens, now };
  const running = state.running || [];
  const words = state.jobs ? `${counted(state.jobs, "job")}, ${Math.max(speed, 0).toFixed(1)} tokens/s` : "None.";
  if (!running.length) return [make("small", {}, words)];
  const row = (tag, ...cells) => make("tr", {}, ...cells.map((cell) => make(tag, {}, String(cell))));
  const head = row("th", "job", "prompt", "new", "tokens/s");
  const rows = running.map((job) => row("td", job.id + (job.in_host_memory ? " (host)" : ""),
    job.prompt_tokens + (job.cached_tokens ? ` (${job.cached_tokens} found)` : ""), job.new_tokens, job.tokens_per_second.toFixed(1)));
  return [make("table", {}, head, ...rows), make("small", {}, words)];
}
