// What the timeline shows: unpacks what view/trace_page.py packs, and says it in words.
// Times are nanoseconds.
"use strict";

// ---------------------------------------------------------------- data

async function unpacked(text) {
  const packed = atob(text), bytes = new Uint8Array(packed.length);
  for (let i = 0; i < bytes.length; i++) bytes[i] = packed.charCodeAt(i);
  const stream = new Blob([bytes]).stream().pipeThrough(new DecompressionStream("gzip"));
  const raw = new Uint8Array(await new Response(stream).arrayBuffer());
  const size = new DataView(raw.buffer).getUint32(0, true);
  const trace = JSON.parse(new TextDecoder().decode(raw.subarray(4, 4 + size)));
  let at = 4 + size;
  for (const [name, planes, length] of trace.columns) {
    const column = trace[name] = new Float64Array(length);
    // All lowest bytes stand first, then all second ones: that packs better.
    for (let plane = 0, factor = 1; plane < planes; plane++, factor *= 256)
      for (let i = 0; i < length; i++) column[i] += raw[at++] * factor;
  }
  return prepared(trace);
}

// Starts from their distances, ends, and for each item the latest end so far in its row.
function prepared(trace) {
  const n = trace.start.length;
  trace.end = new Float64Array(n);
  trace.latest = new Float64Array(n);
  trace.rowOf = new Int32Array(n);
  trace.kindsOf = trace.rows.map(() => 0);
  for (let row = 0, i = 0, block = 0; row < trace.rows.length; row++) {
    const first = i, stop = trace.firsts[row + 1];
    for (; i < stop; i++) {
      trace.start[i] += i > first ? trace.start[i - 1] : trace.from;
      trace.end[i] = trace.start[i] + (trace.count[i] > 1 ? trace.extent[block++] : trace.busy[i]);
      trace.latest[i] = i > first ? Math.max(trace.latest[i - 1], trace.end[i]) : trace.end[i];
      trace.rowOf[i] = row;
      trace.kindsOf[row] |= 1 << trace.kind[i];
    }
  }
  return trace;
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

const kindName = i => trace.kinds[trace.kind[i]];
const sizeOf = i => trace.size[i] ? ` ${bytes(trace.size[i])}` : "";
const label = i => trace.count[i] > 1
  ? `${trace.count[i]} x ${kindName(i)}${sizeOf(i)}` : trace.names[trace.name[i]] + sizeOf(i);

// What the tooltip shows of an item, a line each.
function lines(i) {
  const [place, lane] = trace.rows[trace.rowOf[i]], rank = trace.ranks[place];
  const where = `rank ${rank.rank}, ${lane}`, starts = moment(trace.start[i], Math.min(1e3, pixel()));
  const group = trace.group[i] ? [`group ${trace.groups[trace.group[i] - 1]}`] : [];
  if (trace.count[i] === 1)
    return [label(i), `${kindName(i)}, takes ${took(trace.busy[i])}`, ...group,
            `${where}, starts at ${starts}`];
  return [`${trace.count[i]} ${kindName(i)} events shorter than ${took(trace.width)}, merged`,
          `together ${took(trace.busy[i])} within ${took(trace.end[i] - trace.start[i])}` +
            (sizeOf(i) && `,${sizeOf(i)}`),
          `the longest: ${trace.names[trace.name[i]]}`, ...group, `${where}, starts at ${starts}`];
}
