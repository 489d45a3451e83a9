// Requests to the server, with the key, and their streamed events.

const NAME = "exkv.key";
let asksForKey = () => {};

/** Set the callback for a missing or wrong key; its argument says whether one was sent. */
export function onKeyWanted(run) { asksForKey = run; }
export function useKey(key) { sessionStorage.setItem(NAME, key); }

async function request(path, options = {}) {
  const key = sessionStorage.getItem(NAME);
  const headers = { "Content-Type": "application/json", ...(key ? { Authorization: "Bearer " + key } : {}) };
  const reply = await fetch(path, { ...options, headers });
  if (reply.ok) return reply;
  if (reply.status === 401) asksForKey(Boolean(key));
  let message = `the server says ${reply.status}`;
  try { message = (await reply.json()).error.message; } catch { /* not JSON */ }
  throw new Error(message);
}

export async function get(path) {
  return (await request(path)).json();
}

export async function post(path, body) {
  return (await request(path, { method: "POST", body: JSON.stringify(body) })).json();
}

/** The server-sent events that a POST returns, as objects; throws an error event. */
export async function* events(path, body, signal) {
  const reply = await request(path, { method: "POST", body: JSON.stringify(body), signal });
  const reader = reply.body.pipeThrough(new TextDecoderStream()).getReader();
  let held = "";
  for (;;) {
    const { value, done } = await reader.read();
    if (done) return;
    const parts = (held + value).split(/\r?\n\r?\n/);
    held = parts.pop();
    for (const part of parts) {
      const data = part.split(/\r?\n/).filter((line) => line.startsWith("data:")).map((line) => line.slice(5).trim()).join("\n");
      if (!data || data === "[DONE]") continue;
      const event = JSON.parse(data);
      if (event.error) throw new Error(event.error.message);
      yield event;
    }
  }
}
