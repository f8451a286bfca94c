// What live pictures of recordings have in common: unpacking what view/iframe.py packs, words, colours,
// and moving a canvas by mouse and keys. It reads the element #data, and asks nothing of the network.
// Times are nanoseconds, lengths CSS pixels.
//
// Behind it stands a painter: it has the constants LEFT (where pictures begin) and HEADER (how high a
// rank's bar is), and gives `start` a table of what differs. An item is a number, below 0 for none.
//   label, hint          what the picture shows, and how it is moved
//   prepare(data)        takes the data; gives [begin, end] of all of it
//   takeTheme()          `theme` is another one
//   place()              where things are; gives how high all of it is
//   paint(top, bottom)   what is between two heights
//   legend()             [name, background, class] of each entry
//   itemAt(x, y), textsAt(x, y, i)  what is below the pointer; the tooltip's lines, or null
//   lines(i), spanOf(i)  an item's tooltip; when it begins and ends, or null for one moment
//   reveal(i)            brings it into sight; gives the height of its tooltip
//   nextItem(by), nextRow(by)     where Shift and arrows lead
//   buttons(), keys      more actions, by the button's id and by key
// and, where there is such a thing:
//   reset(), headerAt(y) and fold(place), pull(by) and zoomHeight(factor, y)
"use strict";

const NARROWEST = 20; // the smallest stretch of time (of bytes, for one moment) that fills the picture
const AXIS = 20, SCROLLED = 45; // heights: of the axis, and of what an arrow key scrolls by

const element = id => document.getElementById(id);
const frame = element("frame"), canvas = element("canvas"), tip = element("tip");
const context = canvas.getContext("2d");

let painter, whole; // whole: [begin, end] of all that there is
let from, to; // the stretch of time that fills the picture
let width = 900, height = 300, ratio = 1, total = 0; // total: how high all of it is
let hovered = -1, focused = -1, drag = null, isPressed = false, isPending = false;

// ---------------------------------------------------------------- data

async function unpacked(text) {
  const packed = atob(text), bytes = new Uint8Array(packed.length);
  for (let i = 0; i < bytes.length; i++) bytes[i] = packed.charCodeAt(i);
  const stream = new Blob([bytes]).stream().pipeThrough(new DecompressionStream("gzip"));
  const raw = new Uint8Array(await new Response(stream).arrayBuffer());
  const size = new DataView(raw.buffer).getUint32(0, true);
  const head = JSON.parse(new TextDecoder().decode(raw.subarray(4, 4 + size)));
  let at = 4 + size;
  for (const [name, planes, length] of head.columns) {
    const column = head[name] = new Float64Array(length);
    // All lowest bytes stand first, then all second ones: that packs better.
    for (let plane = 0, factor = 1; plane < planes; plane++, factor *= 256)
      for (let i = 0; i < length; i++) column[i] += raw[at++] * factor;
  }
  return head;
}

// ---------------------------------------------------------------- words

function took(ns) {
  for (const [unit, name] of [[1e9, "s"], [1e6, "ms"], [1e3, "us"]])
    if (ns >= unit) return `${+(ns / unit).toPrecision(4)} ${name}`;
  return `${ns} ns`;
}

// A time with as many digits as a step of the axis, or a pixel, can be told apart.
function moment(ns, step) {
  const [unit, name] = ns + step >= 1e9 ? [1e9, "s"] : ns + step >= 1e6 ? [1e6, "ms"] : [1e3, "us"];
  const digits = Math.max(0, Math.min(9, Math.ceil(-Math.log10(step / unit) - 1e-9)));
  return `${(ns / unit).toFixed(digits)} ${name}`;
}

function bytes(size) {
  for (const [unit, name] of [[1e9, "GB"], [1e6, "MB"], [1e3, "kB"]])
    if (size >= 0.99995 * unit) return `${(size / unit).toFixed(1)} ${name}`;
  return `${size} B`;
}

// ---------------------------------------------------------------- colours

const LIGHT = { back: "#ffffff", lane: "#f3f3f3", head: "#e4e4e4", text: "#1a1a1a", faint: "#6b6b6b", line: "#b5b5b5", ring: "#000000" };
const DARK = { back: "#161616", lane: "#232323", head: "#343434", text: "#ececec", faint: "#a3a3a3", line: "#5a5a5a", ring: "#ffffff" };

let isDark = false, theme = LIGHT;

const channels = text => [1, 3, 5].map(at => parseInt(text.slice(at, at + 2), 16));
const packed = ([red, green, blue]) => (255 << 24 | blue << 16 | green << 8 | red) >>> 0;
const between = (a, b, share) => a.map((value, i) => Math.round(value + (b[i] - value) * share));
const inkOn = ([red, green, blue]) => 0.3 * red + 0.59 * green + 0.11 * blue > 130 ? "#000000" : "#ffffff";

function fitted(context, text, room) {
  if (context.measureText(text).width <= room) return text;
  let cut = text.length - 1;
  while (cut > 1 && context.measureText(text.slice(0, cut) + "\u2026").width > room) cut--;
  return text.slice(0, cut) + "\u2026";
}

// The step of an axis: 1, 2 or 5 times a power of ten, at least so large.
function axisStep(least) {
  const power = 10 ** Math.floor(Math.log10(least));
  return [1, 2, 5, 10].map(digit => digit * power).find(step => step >= least);
}

// ---------------------------------------------------------------- moving

const span = () => to - from;
const pixel = () => span() / (width - LEFT);
const xOf = ns => LEFT + (ns - from) / pixel();
const timeOf = x => from + (x - LEFT) * pixel();
const finest = () => Math.min(1e3, pixel()); // how exactly a moment is told

function show(begin, length) {
  const most = whole[1] - whole[0];
  length = Math.min(most, Math.max(Math.min(NARROWEST, most), length));
  from = Math.min(Math.max(begin, whole[0]), whole[1] - length);
  to = from + length;
  redraw();
}

function zoom(factor, x = (LEFT + width) / 2) {
  const fixed = timeOf(Math.max(LEFT, x)), before = span();
  const length = Math.min(whole[1] - whole[0], Math.max(NARROWEST, before * factor));
  show(fixed - (fixed - from) * (length / before), length);
}

const pan = share => show(from + share * span(), span());

function reset() {
  focused = -1;
  painter.reset?.();
  hideTip();
  frame.scrollTop = 0;
  show(whole[0], whole[1] - whole[0]);
}

function leave() {
  focused = -1;
  hideTip();
  redraw();
}

// Bring an item into sight, show its tooltip, and say it.
function focusOn(i) {
  if (i === undefined || i < 0) return;
  focused = i;
  const stretch = painter.spanOf(i), y = painter.reveal(i);
  if (stretch && (stretch[1] < from || stretch[0] > to)) show((stretch[0] + stretch[1] - span()) / 2, span());
  say(painter.lines(i), stretch ? Math.min(width - 40, Math.max(LEFT, xOf(stretch[0]))) : LEFT, y);
  redraw();
}

function showFocused() {
  const stretch = focused < 0 ? null : painter.spanOf(focused);
  if (!stretch) return;
  const length = Math.max(NARROWEST, stretch[1] - stretch[0]);
  show(stretch[0] - 0.25 * length, 1.5 * length);
}

// ---------------------------------------------------------------- tooltip, mouse and keys

function showTip(texts, x, y) {
  tip.textContent = texts.join("\n");
  tip.hidden = false;
  const room = document.documentElement;
  const under = canvas.getBoundingClientRect().top + y + 18;
  tip.style.left = `${Math.max(0, Math.min(x + 12, room.clientWidth - tip.offsetWidth - 4))}px`;
  const above = under - tip.offsetHeight - 24;
  tip.style.top = `${Math.max(0, under + tip.offsetHeight > room.clientHeight && above > 0 ? above : Math.min(under, room.clientHeight - tip.offsetHeight))}px`;
}

function hideTip() {
  tip.hidden = true;
}

function say(texts, x, y) {
  showTip(texts, x, y);
  element("said").textContent = texts.join(", ");
}

function onMove(event) {
  const { offsetX: x, offsetY: y } = event;
  if (drag) {
    const down = event.clientY - drag.y;
    drag.moved ||= Math.hypot(event.clientX - drag.x, down) > 3;
    show(drag.from - (event.clientX - drag.x) * pixel(), span());
    if (!painter.pull?.(down)) frame.scrollTop = drag.top - down;
    return;
  }
  hovered = painter.itemAt(x, y);
  const texts = painter.textsAt(x, y, hovered);
  canvas.style.cursor = headerAt(y) >= 0 ? "pointer" : "default";
  if (texts) showTip(texts, x, y); else hideTip();
  redraw();
}

const headerAt = y => y > AXIS && painter.headerAt ? painter.headerAt(y) : -1;

// Without focus the wheel scrolls the page, as everywhere; with Ctrl it zooms in any case.
function onWheel(event) {
  if (!event.ctrlKey && !event.metaKey && document.activeElement !== frame) return;
  event.preventDefault();
  const unit = event.deltaMode === 1 ? 20 : 1;
  const factor = by => Math.exp(Math.max(-0.7, Math.min(0.7, by * unit * 0.002)));
  if (event.shiftKey && painter.zoomHeight) return painter.zoomHeight(factor(event.deltaY || event.deltaX), event.offsetY);
  if (event.deltaX) pan(event.deltaX * unit / width);
  if (event.deltaY) zoom(factor(event.deltaY), event.offsetX);
}

const KEYS = {
  "+": () => zoom(0.7), "=": () => zoom(0.7), "-": () => zoom(1 / 0.7), w: () => zoom(0.7), s: () => zoom(1 / 0.7),
  a: () => pan(-0.15), d: () => pan(0.15), ArrowLeft: () => pan(-0.15), ArrowRight: () => pan(0.15),
  ArrowUp: () => { frame.scrollTop -= SCROLLED; }, ArrowDown: () => { frame.scrollTop += SCROLLED; },
  PageUp: () => { frame.scrollTop -= height - SCROLLED; }, PageDown: () => { frame.scrollTop += height - SCROLLED; },
  "Shift ArrowLeft": () => painter.nextItem(-1), "Shift ArrowRight": () => painter.nextItem(1),
  "Shift ArrowUp": () => painter.nextRow(-1), "Shift ArrowDown": () => painter.nextRow(1),
  Home: reset, Enter: showFocused, Escape: leave,
};

function onKey(event) {
  if (event.ctrlKey || event.metaKey || event.altKey) return;
  const isArrow = event.key.startsWith("Arrow");
  const action = { ...KEYS, ...painter.keys }[(event.shiftKey && isArrow ? "Shift " : "") + event.key];
  if (!action) return;
  event.preventDefault();
  event.stopPropagation(); // a notebook's own keys are not meant
  action();
}

function onPress(event) {
  isPressed = true; // who comes by mouse wants no item in a ring
  frame.focus({ preventScroll: true });
  isPressed = false;
  if (event.button) return;
  drag = { x: event.clientX, y: event.clientY, from, top: frame.scrollTop, moved: false };
  canvas.setPointerCapture(event.pointerId);
  hideTip();
}

function onRelease(event) {
  const place = drag && !drag.moved ? headerAt(event.offsetY) : -1;
  if (place >= 0) painter.fold(place);
  drag = null;
}

function listen() {
  canvas.addEventListener("pointerdown", onPress);
  canvas.addEventListener("pointerup", onRelease);
  canvas.addEventListener("pointercancel", () => { drag = null; });
  canvas.addEventListener("pointermove", onMove);
  canvas.addEventListener("pointerleave", () => { hovered = -1; hideTip(); redraw(); });
  canvas.addEventListener("wheel", onWheel, { passive: false });
  frame.addEventListener("keydown", onKey);
  // Who comes by keyboard hears the first item at once.
  frame.addEventListener("focus", () => { if (!isPressed && focused < 0) painter.nextItem(0); });
  frame.addEventListener("blur", leave);
  frame.addEventListener("scroll", redraw);
  const buttons = { in: () => zoom(0.5), out: () => zoom(2), all: reset, ...painter.buttons() };
  for (const [id, action] of Object.entries(buttons)) {
    element(id).hidden = false;
    element(id).onclick = action;
  }
  new ResizeObserver(fit).observe(frame);
  const dark = matchMedia("(prefers-color-scheme: dark)");
  isDark = dark.matches;
  dark.addEventListener("change", () => { isDark = dark.matches; takeTheme(); redraw(); });
}

// ---------------------------------------------------------------- drawing

function takeTheme() {
  theme = isDark ? DARK : LIGHT;
  // The page's own colours are those of the theme.
  for (const name of ["back", "text", "faint", "line"])
    document.documentElement.style.setProperty(`--${name}`, theme[name]);
  painter.takeTheme();
  element("legend").replaceChildren(...painter.legend().map(([name, background, shape = ""]) => {
    const entry = document.createElement("span"), square = document.createElement("i");
    square.style.background = background;
    square.className = shape;
    entry.append(square, name);
    return entry;
  }));
}

// A rank's bar.
function drawHeader(y, rank, text) {
  context.fillStyle = theme.head;
  context.fillRect(0, y, width, HEADER - 2);
  context.fillStyle = theme.text;
  context.font = "bold 11px system-ui, sans-serif";
  context.fillText(fitted(context, rank, LEFT - 8), 4, y + HEADER - 7);
  context.font = "11px system-ui, sans-serif";
  context.fillText(fitted(context, text, width - LEFT - 8), LEFT + 4, y + HEADER - 7);
}

function drawAxis(format = (ns, step) => moment(Math.max(0, ns), step)) {
  context.fillStyle = theme.back;
  context.fillRect(0, 0, width, AXIS);
  const step = axisStep(Math.max(1, pixel() * 105));
  context.font = "11px system-ui, sans-serif";
  for (let at = Math.ceil(from / step) * step; at <= to; at += step) {
    const x = xOf(at), text = format(at, step);
    context.fillStyle = theme.line;
    context.fillRect(Math.round(x), AXIS - 5, 1, 5);
    context.fillStyle = theme.faint;
    if (x + 4 + 6.2 * text.length < width) context.fillText(text, x + 4, 13);
  }
}

function draw() {
  const began = performance.now();
  isPending = false;
  context.setTransform(ratio, 0, 0, ratio, 0, 0);
  context.fillStyle = theme.back;
  context.fillRect(0, 0, width, height);
  painter.paint(frame.scrollTop, frame.scrollTop + height);
  document.body.className = "drawn";
  // For whoever measures: how often was drawn, and how long that took.
  const counts = frame.dataset;
  counts.frames = +(counts.frames || 0) + 1;
  counts.drawMs = +(counts.drawMs || 0) + performance.now() - began;
}

function redraw() {
  if (isPending) return;
  isPending = true;
  requestAnimationFrame(draw);
}

function layOut() {
  total = painter.place();
  element("space").style.height = `${Math.max(0, total - height)}px`;
}

function fit() {
  ratio = window.devicePixelRatio || 1;
  width = Math.max(LEFT + 100, frame.clientWidth);
  height = Math.max(60, frame.clientHeight);
  canvas.width = Math.round(width * ratio);
  canvas.height = Math.round(height * ratio);
  canvas.style.width = `${width}px`;
  canvas.style.height = `${height}px`;
  layOut();
  draw(); // at once: a canvas is empty after its size has changed
}

async function start(table) {
  painter = table;
  frame.setAttribute("aria-label", painter.label);
  element("hint").textContent = painter.hint;
  whole = painter.prepare(await unpacked(element("data").textContent.trim()));
  [from, to] = whole;
  listen();
  takeTheme();
  fit();
  requestAnimationFrame(() => requestAnimationFrame(() => { frame.dataset.paintedMs = Date.now(); }));
}
