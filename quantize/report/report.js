"use strict";
(() => {
  const data = JSON.parse(document.getElementById("data").textContent);
  const $ = (id) => document.getElementById(id);
  const root = document.documentElement;

  // ------------------------------------------------------------------------------------------------ text and numbers
  const make = (tag, text, kind) => {
    const made = document.createElement(tag);
    if (text !== undefined) made.textContent = text;
    if (kind) made.className = kind;
    return made;
  };
  const known = (value) => value !== null && value !== undefined;
  const digits = (value, count = 4) => known(value) ? String(Number(value.toPrecision(count))).replace("-", "−") : "–";
  const micro = (value) => !known(value) ? "–" : value >= 1000 ? `${digits(value / 1000, 3)} ms` : `${digits(value, 3)} µs`;
  const decibels = (value) => known(value) ? `${value.toFixed(1).replace("-", "−")} dB` : "–";
  const share = (value) => !known(value) ? "–" : value === 0 ? "none" : value < 1e-4 ? "less than 0.01 %" : `${(100 * value).toFixed(2)} %`;
  const bytes = (value) => value >= 1e6 ? `${(value / 1e6).toFixed(2)} MB` : value >= 1e3 ? `${(value / 1e3).toFixed(1)} kB` : `${value} B`;
  const short = (text, most) => text.length <= most ? text : `…${text.slice(1 - most)}`;
  // ----------------------------------------------------------------------------------------------------------- theme
  const system = matchMedia("(prefers-color-scheme: dark)");
  let chosen = null;
  const themed = () => {
    const dark = (chosen || (system.matches ? "dark" : "light")) === "dark";
    root.dataset.theme = dark ? "dark" : "light";
    $("theme").textContent = dark ? "Light mode" : "Dark mode";
  };
  $("theme").addEventListener("click", () => {
    chosen = root.dataset.theme === "dark" ? "light" : "dark";
    themed();
  });
  system.addEventListener("change", themed);

  // ---------------------------------------------------------------------------------------------------------- charts
  const charts = new Map();
  const plot = (id, chart) => Charts.draw($(id), chart);
  const chart = (id, draw) => {
    if ($(id)) charts.set(id, { drawn: false, draw() { this.drawn = true; draw(); } });
  };
  const refresh = (id) => { const made = charts.get(id); if (made && made.drawn) made.draw(); };
  const start = () => {
    const seen = new IntersectionObserver((entries) => {
      for (const entry of entries) {
        const made = charts.get(entry.target.id);
        if (entry.isIntersecting && !made.drawn) { made.draw(); seen.unobserve(entry.target); }
      }
    }, { rootMargin: "300px" });
    for (const id of charts.keys()) seen.observe($(id));
    let width = innerWidth;
    addEventListener("resize", () => {
      if (innerWidth === width) return; // a phone hides its address bar
      width = innerWidth;
      for (const made of charts.values()) if (made.drawn) made.draw();
    });
    addEventListener("beforeprint", () => { for (const made of charts.values()) if (!made.drawn) made.draw(); });
  };
  const paints = ["after", "third", "fourth", "dyn-line", "w8-line", "before"];
  const most = (values, start = 0) => values.reduce((one, other) => known(other) ? Math.max(one, other) : one, start);
  const bar = (index, value, room = 0.72, part = 0, parts = 1) => // a bar of several at one place of a category
    ({ from: index - room / 2 + room * part / parts, to: index - room / 2 + room * (part + 1) / parts, low: 0, high: value });
  const column = (index, tip, pick) => ({ from: index - 0.5, to: index + 0.5, tip, pick });

  const tensors = data.tensors || [];
  const byTensor = new Map(tensors.map((row) => [row.name, row]));

  chart("chart-sqnr", () => {
    let rows = tensors.filter((row) => known(row.sqnr_db) || known(row.own_db));
    if ($("sqnr-order").value === "worst") rows = [...rows].sort((a, b) => (a.sqnr_db ?? a.own_db) - (b.sqnr_db ?? b.own_db)).slice(0, 40);
    plot("chart-sqnr", {
      along: { names: rows.map((row) => row.name), title: "tensors, in order of execution" }, up: { title: "SQNR, dB", lo: 0, hi: 1.05 * most(rows.flatMap((row) => [row.sqnr_db, row.own_db]), 1) },
      series: [{ name: "in the INT8 model", kind: "bars", paint: "after", values: rows.flatMap((row, index) => known(row.sqnr_db) ? [bar(index, Math.max(0, row.sqnr_db))] : []) },
        { name: "its own range alone", kind: "points", paint: "third", look: 1, values: rows.flatMap((row, index) => known(row.own_db) ? [{ at: index, value: row.own_db }] : []) }],
      hits: rows.map((row, index) => column(index, `${row.name}\n${decibels(row.sqnr_db)} in the INT8 model\n${decibels(row.own_db)} by its own range alone`, () => choose(row.name))),
    });
  });
  if ($("sqnr-order")) $("sqnr-order").addEventListener("change", () => refresh("chart-sqnr"));

  const choose = (name) => {
    const row = byTensor.get(name);
    if (!row || !row.bins || !$("tensor")) return;
    $("tensor").value = name;
    histogram(row);
  };
  let shown = null;
  const range = (row) => known(row.lo) ? `${digits(row.lo)} to ${digits(row.hi)}` : "none: the tensor stays float";
  const readers = (name) => [...new Set(data.graph.nodes.filter((node) => node.inputs.includes(name)).map((node) => node.op))].slice(0, 4).join(", ");
  const histogram = (row) => {
    shown = row;
    const told = $("tensor-told");
    told.textContent = `${row.name}: observed ${digits(row.least)} to ${digits(row.most)}; range ${range(row)}`
      + (row.shares ? `, shared with ${row.shares}` : "") + (known(row.clipped) ? `; clips ${share(row.clipped)} of the values` : "")
      + (known(row.own_db) ? `; SQNR ${decibels(row.own_db)} with this range alone` : "")
      + (known(row.alone_db) ? `; ${decibels(row.alone_db)} at the outputs if only this tensor is quantized` : "") + (readers(row.name) ? `; read by ${readers(row.name)}.` : ".");
    const body = $("tensor-table"), { start, width, counts } = row.bins;
    body.replaceChildren(...counts.map((count, index) => {
      const line = make("tr");
      line.append(make("td", digits(start + index * width), "n"), make("td", digits(start + (index + 1) * width), "n"), make("td", count.toLocaleString("en"), "n"));
      return line;
    }));
    const made = charts.get("chart-histogram");
    made.draw();
  };
  chart("chart-histogram", () => {
    if (!shown) return;
    const row = shown, { start, width, counts } = row.bins, { lo, hi } = row;
    const log = $("tensor-log").checked, top = most(counts, 1), least = log ? 0.5 : 0, end = start + counts.length * width;
    const outside = (at) => row.clipped > 0 && (at < Math.min(lo, 0) || at > Math.max(hi, 0)); // nothing is marked where nothing is clipped
    const given = known(lo), edges = given ? [start, end, lo, hi] : [start, end], values = counts.map((count, index) => ({
      from: start + index * width, to: start + (index + 1) * width, low: least, high: Math.max(count, least), paint: given && outside(start + (index + 0.5) * width) ? "clip" : "after",
    }));
    plot("chart-histogram", {
      along: { title: "value", lo: Math.min(...edges), hi: Math.max(...edges) }, up: { title: "values", log, lo: least, hi: log ? top * 1.6 : top * 1.05 },
      series: [{ name: "values", kind: "bars", paint: "after", values }],
      marks: given ? [{ at: lo, text: `range from ${digits(lo)}`, side: "start" }, { at: hi, text: `to ${digits(hi)}`, side: "end" }] : [],
      hits: values.map((each, index) => ({ ...each, tip: `${digits(each.from)} to ${digits(each.to)}\n${counts[index].toLocaleString("en")} values${each.paint === "clip" ? ", clipped" : ""}` })),
    });
  });
  if ($("tensor")) {
    const least = (key) => tensors.filter((row) => row.bins && known(row[key])).sort((a, b) => a[key] - b[key])[0];
    const worst = least("alone_db") || least("own_db") || tensors.find((row) => row.bins);
    $("tensor").addEventListener("change", () => {
      const named = $("tensor").value;
      const found = byTensor.get(named) || tensors.find((row) => row.bins && row.name.toLowerCase().includes(named.toLowerCase()));
      if (found && found.bins) choose(found.name); else $("tensor-told").textContent = `No tensor with a histogram is called ${named}.`;
    });
    $("tensor-log").addEventListener("change", () => refresh("chart-histogram"));
    $("tensor").value = worst.name;
    shown = worst;
    const made = charts.get("chart-histogram"), draw = made.draw;
    made.draw = function () { this.draw = draw; this.drawn = true; histogram(shown); };
  }

  const weights = new Map((data.weights || []).map((row) => [row.node, row]));
  chart("chart-weights", () => {
    const row = weights.get($("layer").value);
    const values = row.lo.map((lo, index) => ({ from: (index + 0.08) * row.group, to: (index + 0.92) * row.group, low: lo, high: row.hi[index] }));
    plot("chart-weights", {
      along: { title: "output channel", lo: 0, hi: row.lo.length * row.group }, up: { title: "weight", lo: 1.05 * Math.min(0, ...row.lo), hi: 1.05 * most(row.hi) || 1 },
      series: [{ name: "weights", kind: "bars", paint: "after", values }],
      hits: row.lo.map((lo, index) => ({ from: index * row.group, to: (index + 1) * row.group, tip: `channel ${index * row.group}\n${digits(lo)} to ${digits(row.hi[index])}` })),
    });
    const widths = row.lo.map((lo, index) => Math.max(-lo, row.hi[index])).sort((a, b) => a - b);
    const widest = widths[widths.length - 1], middle = widths[Math.floor(widths.length / 2)];
    $("layer-told").textContent = `${row.tensor}: ${row.channels} output channels of ${row.op}`
      + (row.group > 1 ? `, ${row.group} per bar` : "") + `; greatest absolute weight: ${digits(widest, 3)} in the widest channel, ${digits(middle, 3)} in the median channel.`;
    $("layer-table").replaceChildren(...row.lo.map((lo, index) => {
      const line = make("tr"), first = index * row.group, last = Math.min(first + row.group, row.channels) - 1;
      line.append(make("td", first === last ? String(first) : `${first}–${last}`), make("td", digits(lo), "n"), make("td", digits(row.hi[index]), "n"));
      return line;
    }));
  });
  if ($("layer")) $("layer").addEventListener("change", () => charts.get("chart-weights").draw());

  const lying = (id, names, series) => { // groups of lying bars, a group for each name
    const few = names.slice(0, 20);
    plot(id, {
      flat: true, along: { names: few }, up: { title: "µs per run", lo: 0, hi: 1.03 * most(series.flatMap((row) => row.values.slice(0, 20)), 1) },
      series: series.map((row, part) => ({ ...row, kind: "bars", values: few.flatMap((_, index) => known(row.values[index]) ? [bar(index, row.values[index], 0.76, part, series.length)] : []) })),
      hits: few.map((name, index) => column(index, [name, ...series.map((row) => `${micro(row.values[index])} ${row.name}`)].join("\n"))),
      height: 110 + few.length * Math.max(26, 11 * series.length + 8),
    });
  };
  chart("chart-time", () => {
    const series = [{ name: "float", paint: "before", look: 1, values: data.times.map((row) => row.float_us) }, { name: data.kept_float ? "output (float)" : "INT8", paint: "after", values: data.times.map((row) => row.int8_us) }];
    if (data.times.some((row) => known(row.tried_us))) series.push({ name: "INT8, rejected", paint: "third", look: 2, values: data.times.map((row) => row.tried_us) });
    lying("chart-time", data.times.map((row) => row.op), series);
  });

  chart("chart-search", () => {
    const found = data.search, scored = [...found.points, ...found.frontier].filter((row) => known(row.value));
    const at = (rows) => rows.filter((row) => known(row.value)).map((row) => ({ at: row.speedup, value: row.value }));
    const series = [{ name: "frontier", kind: "line", paint: "soft", values: at(found.frontier) }, { name: "keeps the bar", kind: "points", paint: "after", look: 0, values: at(found.points.filter((row) => row.kept)) },
      { name: "misses the bar", kind: "points", paint: "third", look: 4, values: at(found.points.filter((row) => !row.kept)) }];
    if (known(found.before)) series.push({ name: "float", kind: "points", paint: "before", look: 2, values: at([{ speedup: 1, value: found.before }]) });
    const speeds = [1, ...scored.map((row) => row.speedup)], scores = [...scored.map((row) => row.value), ...[found.before, found.bar].filter(known)];
    const room = (values) => { const lo = Math.min(...values), hi = Math.max(...values), more = 0.08 * (hi - lo) || 0.05 * Math.abs(hi) || 1; return { lo: lo - more, hi: hi + more }; };
    const near = room(speeds), wide = 0.015 * (near.hi - near.lo);
    plot("chart-search", {
      along: { title: "times as fast as float", ...near }, up: { title: found.metric, ...room(scores) }, series,
      levels: known(found.bar) ? [{ value: found.bar, text: "the bar" }] : [],
      hits: scored.map((row) => ({ from: row.speedup - wide, to: row.speedup + wide, tip: `${row.speedup.toFixed(2)}×\n${digits(row.value, 5)}` })),
    });
  });

  // several runs side by side
  chart("chart-runs-sqnr", () => {
    const { names, runs } = data.sqnr, many = names.length * runs.length > 60;
    const values = (row, part) => names.flatMap((_, index) => !known(row.values[index]) ? [] : [many ? { at: index, value: row.values[index] } : bar(index, Math.max(0, row.values[index]), 0.76, part, runs.length)]);
    plot("chart-runs-sqnr", {
      along: { names, title: "tensors, in order of execution" }, up: { title: "SQNR, dB", lo: 0, hi: 1.05 * most(runs.flatMap((row) => row.values), 1) },
      series: runs.map((row, index) => ({ name: row.name, kind: many ? "points" : "bars", paint: paints[index % paints.length], look: index, values: values(row, index) })),
      hits: names.map((name, index) => column(index, [name, ...runs.map((row) => `${decibels(row.values[index])} ${row.name}`)].join("\n"))),
    });
  });
  chart("chart-runs-time", () => lying("chart-runs-time", data.time.names, data.time.runs.map((row, index) => ({ ...row, paint: paints[index % paints.length], look: index }))));

  // ----------------------------------------------------------------------------------------------------------- graph
  const svg = $("graph-svg");
  if (svg) {
    const boxes = [...svg.querySelectorAll(".box")], edges = [...svg.querySelectorAll(".edge")];
    const links = data.links; // [source, target, tensor] by index of box
    const nodes = new Map(data.graph.nodes.map((node) => [node.name, node]));
    const units = new Map();
    for (const unit of data.units || []) for (const name of unit.nodes) units.set(name, unit);
    const whole = { w: Number(svg.dataset.width), h: Number(svg.dataset.height) };
    const view = { x: 0, y: 0, scale: 1 }; // scale: pixels of the picture to a pixel of the screen
    const place = (box) => ({ x: Number(box.dataset.x), y: Number(box.dataset.y) });
    const apply = () => {
      const { width, height } = svg.getBoundingClientRect();
      view.scale = Math.min(Math.max(view.scale, 0.25), Math.max(whole.w / width, whole.h / height, 1) * 1.5);
      svg.setAttribute("viewBox", `${view.x} ${view.y} ${width * view.scale} ${height * view.scale}`);
    };
    const zoom = (factor, at) => {
      const { width, height, left, top } = svg.getBoundingClientRect();
      const px = at ? at.x - left : width / 2, py = at ? at.y - top : height / 2, old = view.scale;
      view.scale = Math.min(Math.max(old * factor, 0.25), Math.max(whole.w / width, whole.h / height, 1) * 1.5);
      view.x += px * (old - view.scale);
      view.y += py * (old - view.scale);
      apply();
    };
    const fit = () => {
      const { width, height } = svg.getBoundingClientRect();
      view.scale = Math.max(whole.w / width, whole.h / height, 0.5);
      view.x = (whole.w - width * view.scale) / 2;
      view.y = (whole.h - height * view.scale) / 2;
      apply();
    };
    const home = () => {
      const { width, height } = svg.getBoundingClientRect(), first = place(boxes[0]);
      if (Math.max(whole.w / width, whole.h / height) <= 1.2) return fit();
      view.scale = 1;
      view.x = first.x - width / 2;
      view.y = -12;
      apply();
    };
    const reveal = (box) => {
      const { width, height } = svg.getBoundingClientRect(), at = place(box), pad = 90;
      const w = width * view.scale, h = height * view.scale;
      if (at.x < view.x + pad || at.x > view.x + w - pad) view.x = at.x - w / 2;
      if (at.y < view.y + pad / 2 || at.y > view.y + h - pad / 2) view.y = at.y - h / 2;
      apply();
    };
    let current = null, moved = false;
    const select = (index, focus) => {
      const box = boxes[index];
      const before = boxes[current ?? 0];
      before.classList.remove("on");
      before.setAttribute("tabindex", "-1");
      if (current !== null) before.setAttribute("aria-pressed", "false");
      for (const edge of svg.querySelectorAll(".edge.near")) edge.classList.remove("near");
      current = index;
      box.classList.add("on");
      box.setAttribute("aria-pressed", "true");
      box.setAttribute("tabindex", "0");
      links.forEach(([source, target], at) => { if (source === index || target === index) edges[at].classList.add("near"); });
      if (focus) box.focus({ preventScroll: true });
      reveal(box);
      tell(box);
    };
    const step = (index, key) => {
      const down = key === "ArrowDown";
      if (down || key === "ArrowUp") {
        const found = links.filter((link) => link[down ? 0 : 1] === index).map((link) => link[down ? 1 : 0]);
        return found.length ? found[0] : index;
      }
      if (key === "Home") return 0;
      if (key === "End") return boxes.length - 1;
      const at = place(boxes[index]), sign = key === "ArrowRight" ? 1 : -1;
      const beside = boxes.map((box, other) => ({ other, ...place(box) })).filter((b) => b.y === at.y && sign * (b.x - at.x) > 0).sort((a, b) => sign * (a.x - b.x));
      return beside.length ? beside[0].other : index;
    };
    svg.addEventListener("click", (event) => {
      const box = event.target.closest(".box");
      if (box && !moved) select(boxes.indexOf(box), true);
    });
    svg.addEventListener("keydown", (event) => {
      const box = event.target.closest(".box");
      if (!box) return;
      const index = boxes.indexOf(box);
      if (event.key === "Enter" || event.key === " ") select(index, true);
      else if (event.key === "+" || event.key === "=") zoom(0.8);
      else if (event.key === "-") zoom(1.25);
      else if (/^(Arrow|Home|End)/.test(event.key)) select(step(index, event.key), true);
      else return;
      event.preventDefault();
    });
    const held = new Map();
    let spread = 0;
    svg.addEventListener("pointerdown", (event) => { held.set(event.pointerId, event); moved = false; spread = 0; });
    addEventListener("pointermove", (event) => {
      const before = held.get(event.pointerId);
      if (!before) return;
      const dx = event.clientX - before.clientX, dy = event.clientY - before.clientY;
      if (held.size === 1) {
        if (!moved && Math.hypot(dx, dy) < 4) return;
        moved = true;
        svg.classList.add("held");
        view.x -= dx * view.scale;
        view.y -= dy * view.scale;
        apply();
      }
      held.set(event.pointerId, event);
      if (held.size === 2) {
        const [a, b] = [...held.values()], now = Math.hypot(a.clientX - b.clientX, a.clientY - b.clientY);
        moved = true;
        if (spread) zoom(spread / now, { x: (a.clientX + b.clientX) / 2, y: (a.clientY + b.clientY) / 2 });
        spread = now;
      }
    });
    const release = (event) => { held.delete(event.pointerId); spread = 0; svg.classList.remove("held"); };
    addEventListener("pointerup", release);
    addEventListener("pointercancel", release);
    svg.addEventListener("wheel", (event) => {
      if (!event.ctrlKey && !event.metaKey && !event.altKey) return; // the page scrolls
      event.preventDefault();
      zoom(event.deltaY > 0 ? 1.15 : 1 / 1.15, { x: event.clientX, y: event.clientY });
    }, { passive: false });
    $("zoom-in").addEventListener("click", () => zoom(0.75));
    $("zoom-out").addEventListener("click", () => zoom(1 / 0.75));
    $("zoom-fit").addEventListener("click", fit);
    new ResizeObserver(apply).observe(svg);
    $("node").addEventListener("change", () => {
      const named = $("node").value, texts = boxes.map((box) => box.dataset.name);
      let index = texts.indexOf(named);
      if (index < 0 && named) index = texts.findIndex((text) => text.toLowerCase().includes(named.toLowerCase()));
      if (index >= 0) select(index, false);
    });

    // the panel with the details of a node
    const panel = $("node-panel");
    const list = (rows) => {
      const made = make("dl");
      for (const [term, text] of rows) if (known(text) && text !== "" && text !== "–") made.append(make("dt", term), make("dd", text));
      return made;
    };
    const block = (title, rows) => { const made = list(rows); return made.childElementCount ? [make("h4", title), made] : []; };
    const about = (name) => {
      const row = byTensor.get(name), shape = data.graph.values[name];
      const rows = [["type", shape]];
      if (row) {
        if (row.uint8 || (shape || "float").includes("float")) rows.push(["stored", row.uint8 ? "8-bit integers" : "float"]);
        rows.push(["SQNR", decibels(row.sqnr_db)], ["range alone", decibels(row.own_db)], ["at the outputs", decibels(row.alone_db)]);
        if (row.uint8) rows.push(["range", range(row)]);
        if (known(row.least)) rows.push(["observed", `${digits(row.least)} to ${digits(row.most)}`]);
        if (known(row.clipped)) rows.push(["clipped", share(row.clipped)]);
        if (row.shares) rows.push(["range shared with", row.shares]);
      }
      return rows;
    };
    const kinds = { "u8->u8": "INT8, from and to 8-bit integers", "u8->u8 gemm": "INT8, as a matrix product", "u8->u8 native": "INT8, in an operator of requant", "u8->float": "INT8 products, float result", block: "weights in blocks of integers, float to float", dynamic: "INT8 products, ranges found at run time", "weight-only": "INT8 weights, computed in float", float: "float" };
    const tell = (box) => {
      const name = box.dataset.name, node = box.dataset.kind === "node" ? nodes.get(name) : null, parts = [];
      if (!node) {
        parts.push(make("h3", name), make("p", `${box.dataset.kind} of the model`, "soft"), ...block("Tensor", about(name)));
      } else {
        const unit = units.get(name);
        parts.push(make("h3", node.op), make("p", name, "soft mono"));
        if (unit) {
          parts.push(list([["computes", kinds[unit.implementation] || unit.implementation]]));
          if (unit.reason) parts.push(make("p", `${unit.implementation === "float" ? "Why it is float" : "Why"}: ${unit.reason}`, "why"));
          const gain = known(unit.float_us) && unit.int8_us ? ` (${digits(unit.float_us / unit.int8_us, 3)}×)` : "";
          parts.push(...block("Kernels and time", [["float", micro(unit.float_us)], ["", unit.float_kernels.join(", ")], ["output", known(unit.int8_us) ? micro(unit.int8_us) + gain : known(unit.float_us) ? "no kernel of its own" : null], ["", unit.int8_kernels.join(", ")],
            ["together with", unit.nodes.filter((other) => other !== name).join(", ")], ["16-bit sums", unit.relieved ? `${unit.relieved} channels lost weight range` : ""]]));
        }
        const outputs = new Set([...node.outputs, ...(unit && unit.name === name ? unit.outputs : [])]);
        for (const output of outputs) parts.push(...block(`Output ${output}`, about(output)));
        for (const input of node.inputs) parts.push(...block(`Input ${input}`, [["type", data.graph.values[input]]]));
        parts.push(...block("Constants", Object.entries(node.constants)), ...block("Attributes", Object.entries(node.attributes)));
        if (node.parameters) parts.push(...block("Size", [["parameters", node.parameters.toLocaleString("en")], ["bytes", bytes(node.bytes)]]));
        parts.push(...block("Where", [["domain", node.domain], ["in the body of", node.body]]));
        const drawn = [...outputs].find((output) => byTensor.get(output) && byTensor.get(output).bins);
        if (drawn && $("tensor")) {
          const button = make("button", "Show its histogram");
          button.addEventListener("click", () => { choose(drawn); $("histogram").scrollIntoView(); $("tensor").focus({ preventScroll: true }); });
          parts.push(make("p"), button);
        }
      }
      panel.replaceChildren(...parts);
    };
    if (boxes.length) {
      boxes[0].setAttribute("tabindex", "0");
      home();
      const first = boxes.findIndex((box) => box.dataset.kind === "node" && box.dataset.name === data.chosen);
      if (first >= 0) select(first, false);
    }
  }

  themed();
  start();
  root.dataset.ready = "yes";
  performance.mark("requant-ready");
})();
