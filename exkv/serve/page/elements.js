// Helpers to make elements. Text becomes text nodes: nothing here parses HTML.

export const $ = (id) => document.getElementById(id);

/** An element with properties and children; strings become text. */
export function make(tag, properties = {}, ...children) {
  const element = document.createElement(tag);
  for (const [name, value] of Object.entries(properties)) {
    if (name in element) element[name] = value;
    else element.setAttribute(name, value);
  }
  element.append(...children);
  return element;
}

/** A button with its action. */
export function button(text, run, properties = {}) {
  return make("button", { type: "button", onclick: run, ...properties }, text);
}

/** Copy a text to the clipboard; by a selection where the clipboard API is not allowed. */
export async function copy(text) {
  try {
    await navigator.clipboard.writeText(text);
  } catch {
    const held = make("textarea", { value: text });
    document.body.append(held);
    held.select();
    document.execCommand("copy");
    held.remove();
  }
}

/** Bytes in a readable unit. */
export function size(bytes) {
  const units = ["B", "KiB", "MiB", "GiB"];
  let unit = 0;
  while (bytes >= 1024 && unit < 3) { bytes /= 1024; unit += 1; }
  return (unit ? bytes.toFixed(2) : Math.round(bytes)) + " " + units[unit];
}

/** "1 token", "2 tokens". */
export const counted = (number, what) => `${number} ${what}${number === 1 ? "" : "s"}`;
