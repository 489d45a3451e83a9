// Memory and jobs, polled every 1 to 3 s while the page is visible.

import { get } from "./api.js";
import { bar, device } from "./bars.js";
import { $, counted, make } from "./elements.js";

let before = null;
let timer = 0;
export let state = null;

/** Poll now, and keep polling. */
export async function refresh() {
  clearTimeout(timer);
  try {
    if (document.visibilityState === "visible") show(state = await get("v1/state"));
  } catch (error) {
    $("model").textContent = "exkv";
    $("devices").replaceChildren(make("small", {}, error instanceof TypeError ? "The server can't be reached." : error.message));
    $("jobs").replaceChildren();
  }
  clearTimeout(timer); // of a poll that began meanwhile
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

/** A device's bytes; its share of the pages is as used as all pages together. */
function parts(each, pages) {
  const share = (count) => pages.total ? each.cache * count / pages.total : 0;
  const held = pages.total - pages.available, shared = pages.shared || 0;
  return [
    ["weights", "weights", each.weights],
    ["used", "pages in use", share(held - shared)],
    ["shared", "shared by several", share(shared)],
    ["known", "prefix cache", share(pages.known)],
    ["pages", "pages free", share(pages.available - pages.known)],
    ["calls", "for calls", each.workspace],
  ];
}

/** Host memory: swapped-out jobs, and prefix-cache pages. */
function inHost(host) {
  if (!host || !(host.jobs || host.pages_room)) return [];
  const jobs = `${counted(host.jobs, "job")} swapped out`;
  const found = device("In host memory", [
    ["swapped", jobs, host.jobs_bytes],
    ["known", "prefix cache", host.pages],
    ["pages", "room for pages", host.pages_room - host.pages],
  ], 0);
  found.id = "host";
  return [found];
}

/** The pages in a bar of their own: in a device's bar they may be too small to see. */
function pagesAlone(state) {
  const { total, available, known, shared } = state.pages;
  if (!total) return [make("small", {}, state.loading ? `Loading: ${state.loading[0]} of ${state.loading[1]}` : "")];
  const held = total - available, inHost = state.running.filter((job) => job.in_host_memory).length;
  const words = `${held} of ${total} in use` + (shared ? `, ${shared} shared` : "") + `, ${known} in the prefix cache` +
    (inHost ? `; ${counted(inHost, "job")} in host memory` : "");
  const pieces = [["used", "in use", held - shared], ["shared", "shared", shared], ["known", "prefix cache", known], ["pages", "free", available - known]];
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
    job.prompt_tokens + (job.cached_tokens ? ` (${job.cached_tokens} cached)` : ""), job.new_tokens, job.tokens_per_second.toFixed(1)));
  return [make("table", {}, head, ...rows), make("small", {}, words)];
}
