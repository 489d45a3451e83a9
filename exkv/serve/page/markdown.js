// The Markdown that answers use, as elements: paragraphs, headings, lists, quotes, tables, code.
// Anything else stays as it is. Text becomes text nodes, and links go to http(s) only.

import { button, copy, make } from "./elements.js";

const FENCE = /^ {0,3}(`{3,}|~{3,})\s*([\w+#.-]*)/;
const HEADING = /^(#{1,6})\s+(.*?)\s*#*$/;
const ITEM = /^(\s*)([-*+]|\d{1,9}[.)])\s+(.*)$/;
const RULE = /^ {0,3}([-*_])(\s*\1){2,}\s*$/;
const ROW = /^\s*\|.*\|\s*$/;
const DEEPEST = 12; // nested lists and quotes

/** A text as elements. */
export function rendered(text) {
  return blocks(text.split("\n"), 0);
}

function blocks(lines, depth) {
  const found = [];
  let at = 0;
  while (at < lines.length) {
    const read = [code, heading, rule, quote, table, list].find((each) => each.begins(lines, at, depth)) || paragraph;
    const [element, next] = read(lines, at, depth);
    if (element) found.push(element);
    at = next;
  }
  return found;
}

function code(lines, at) {
  const [, fence, language] = FENCE.exec(lines[at]);
  let end = at + 1;
  while (end < lines.length && !lines[end].trim().startsWith(fence)) end += 1;
  const text = lines.slice(at + 1, end).join("\n");
  const block = make("div", { className: "block" }, make("pre", {}, make("code", { title: language }, text)));
  block.append(button("copy", () => copy(text), { className: "copy" }));
  return [block, end + 1];
}
code.begins = (lines, at) => FENCE.test(lines[at]);

function heading(lines, at) {
  const [, marks, text] = HEADING.exec(lines[at]);
  return [make("h" + Math.min(marks.length + 2, 5), {}, ...inline(text)), at + 1];
}
heading.begins = (lines, at) => HEADING.test(lines[at]);

function rule(lines, at) {
  return [make("hr"), at + 1];
}
rule.begins = (lines, at) => RULE.test(lines[at]);

function quote(lines, at, depth) {
  let end = at;
  while (end < lines.length && /^\s*>/.test(lines[end])) end += 1;
  const inner = lines.slice(at, end).map((line) => line.replace(/^\s*> ?/, ""));
  return [make("blockquote", {}, ...blocks(inner, depth + 1)), end];
}
quote.begins = (lines, at, depth) => depth < DEEPEST && /^\s*>/.test(lines[at]);

function table(lines, at) {
  let end = at;
  while (end < lines.length && ROW.test(lines[end])) end += 1;
  const cells = (line) => line.trim().slice(1, -1).split(/(?<!\\)\|/).map((cell) => cell.trim().replaceAll("\\|", "|"));
  const row = (line, tag) => make("tr", {}, ...cells(line).map((cell) => make(tag, {}, ...inline(cell))));
  const body = lines.slice(at + 2, end).map((line) => row(line, "td"));
  return [make("div", { className: "table" }, make("table", {}, row(lines[at], "th"), ...body)), end];
}
table.begins = (lines, at) => ROW.test(lines[at]) && /^[\s|:-]+$/.test(lines[at + 1] || "") && (lines[at + 1] || "").includes("-");

function list(lines, at, depth) {
  const [, indent, mark] = ITEM.exec(lines[at]);
  const ordered = /\d/.test(mark);
  const element = make(ordered ? "ol" : "ul", ordered ? { start: parseInt(mark, 10) } : {});
  let end = at;
  while (end < lines.length) {
    const item = ITEM.exec(lines[end]);
    if (!item || item[1].length > indent.length + 1 || /\d/.test(item[2]) !== ordered) break;
    const begin = end++;
    while (end < lines.length && belongs(lines, end, indent.length)) end += 1;
    const rest = lines.slice(begin + 1, end);
    const deeper = Math.min(...rest.filter((line) => line.trim()).map((line) => line.search(/\S/)), 80);
    const inner = [item[3], ...rest.map((line) => line.slice(deeper))];
    const parts = blocks(inner, depth + 1);
    const tight = parts[0]?.tagName === "P" && !rest.some((line) => !line.trim());
    element.append(make("li", {}, ...(tight ? [...parts[0].childNodes, ...parts.slice(1)] : parts)));
  }
  return [element, end];
}
list.begins = (lines, at, depth) => depth < DEEPEST && ITEM.test(lines[at]);

/** Whether a line continues a list item. */
function belongs(lines, at, indent) {
  if (!lines[at].trim()) {
    const next = lines.slice(at + 1).find((line) => line.trim());
    return next !== undefined && (next.search(/\S/) > indent || ITEM.test(next));
  }
  const item = ITEM.exec(lines[at]);
  if (item) return item[1].length > indent + 1;
  return lines[at].search(/\S/) > indent || (Boolean(lines[at - 1].trim()) && !FENCE.test(lines[at]));
}

function paragraph(lines, at) {
  if (!lines[at].trim()) return [null, at + 1];
  let end = at + 1;
  const begins = [code, heading, rule, quote, table, list];
  while (end < lines.length && lines[end].trim() && !begins.some((each) => each.begins(lines, end, 0))) end += 1;
  const parts = lines.slice(at, end).flatMap((line, index) => [...(index ? [make("br")] : []), ...inline(line)]);
  return [make("p", {}, ...parts), end];
}

// Inline -----------------------------------------------------------------------------------------

const INLINE = /(`+)(.+?)\1(?!`)|(\*\*|__)(?=\S)(.+?\S?)\3|(~~)(?=\S)(.+?)~~|(?<![\w*])([*_])(?=\S)([^*_]+?)\7(?!\w)|!?\[([^\]]*)\]\(([^()\s]+)\)|(https?:\/\/[^\s<>()"']+[\w/])/;

function inline(text, depth = 0) {
  const found = [];
  while (text) {
    const match = depth < DEEPEST ? INLINE.exec(text) : null;
    if (!match) { found.push(text); break; }
    if (match.index) found.push(text.slice(0, match.index));
    found.push(styled(match, depth + 1));
    text = text.slice(match.index + match[0].length);
  }
  return found;
}

function styled(match, depth) {
  const [whole, ticks, quoted, , strong, , struck, , leaning, label, target, address] = match;
  if (ticks) return make("code", {}, quoted);
  if (strong) return make("strong", {}, ...inline(strong, depth));
  if (struck) return make("s", {}, ...inline(struck, depth));
  if (leaning) return make("em", {}, ...inline(leaning, depth));
  return link(target || address, target ? label || target : address) || whole;
}

/** A link to another site; null for other schemes, such as javascript:. */
function link(target, label) {
  if (!/^https?:\/\//i.test(target)) return null;
  return make("a", { href: target, title: target, target: "_blank", rel: "noopener noreferrer" }, label);
}
