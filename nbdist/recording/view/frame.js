// What live pictures have in common: unpacking what view/frame.py packs, numbers as words, colours.
// Times are nanoseconds.
"use strict";

const element = id => document.getElementById(id);

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

const channels = text => [1, 3, 5].map(at => parseInt(text.slice(at, at + 2), 16));
const packed = ([red, green, blue]) => (255 << 24 | blue << 16 | green << 8 | red) >>> 0;
const between = (a, b, share) => a.map((value, i) => Math.round(value + (b[i] - value) * share));
const inkOn = ([red, green, blue]) => 0.3 * red + 0.59 * green + 0.11 * blue > 130 ? "#000000" : "#ffffff";

// The page's own colours are those of the theme.
function tint(theme) {
  for (const name of ["back", "text", "faint", "line"])
    document.documentElement.style.setProperty(`--${name}`, theme[name]);
}

function fitted(context, text, room) {
  if (context.measureText(text).width <= room) return text;
  let cut = text.length - 1;
  while (cut > 1 && context.measureText(text.slice(0, cut) + "\u2026").width > room) cut--;
  return text.slice(0, cut) + "\u2026";
}

// The step of an axis: 1, 2 or 5 times a power of ten, at least so large.
function axisStep(least) {
  const power = 10 ** Math.floor(Math.log10(least));
  return [1, 2, 5, 10].map(digit => digit * power).find(one => one >= least);
}
