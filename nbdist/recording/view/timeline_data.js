// What the timeline shows: unpacks what view/trace_page.py packs, and says it in words.
// Times are nanoseconds. It stands behind frame.js.

// ---------------------------------------------------------------- data

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
