// A device's memory bar, in proportion, and its legend with sizes.

import { make, size } from "./elements.js";

/**
 * A bar with its legend.
 * @param parts [class, label, bytes] in order.
 * @param whole bytes of the device, 0 if unknown.
 * @param rest label of the bytes that no part takes.
 */
export function device(name, parts, whole, rest = "free") {
  const taken = parts.reduce((sum, [, , bytes]) => sum + bytes, 0);
  const length = Math.max(whole, taken, 1);
  const words = `${name}: ${size(taken)} taken` + (whole ? ` of ${size(whole)}` : "");
  const drawn = bar(words, parts.map(([kind, what, bytes]) => [kind, `${what} ${size(bytes)}`, bytes / length]));
  const entries = parts.filter(([, , bytes]) => bytes).map(([kind, what, bytes]) => entry(kind, what, bytes));
  if (whole) entries.push(entry("free", taken > whole ? "too much" : rest, Math.abs(whole - taken)));
  if (taken > whole && whole) drawn.classList.add("over");
  const head = make("strong", {}, make("span", {}, name), make("span", {}, whole ? size(whole) : ""));
  return make("div", { className: "device" }, head, drawn, make("ul", { className: "legend" }, ...entries));
}

/** The bar alone, of [class, title, share of its length] in order; each is at least 2 px wide. */
export function bar(words, pieces) {
  const element = make("div", { className: "bar", role: "img", "aria-label": words });
  for (const [className, title, share] of pieces) {
    if (!share) continue;
    const piece = make("i", { className, title });
    piece.style.width = `max(2px, ${100 * share}%)`;
    element.append(piece);
  }
  return element;
}

function entry(kind, what, bytes) {
  return make("li", { className: kind }, make("span", {}, what), make("span", {}, size(bytes)));
}
