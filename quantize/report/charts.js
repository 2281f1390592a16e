"use strict";
// Bars, points and lines as SVG. `Charts.draw(host, chart)` fills a host element with a chart:
//   along:  {title, names} for categories, or {title, lo, hi} for numbers: the axis along which bars stand
//   up:     {title, lo, hi, log}: the axis of the values
//   flat:   whether the bars lie: `along` runs down the page
//   series: [{name, kind: "bars" | "points" | "line", paint, look, values}]; a bar is {from, to, low, high, paint},
//           a point of "points" or "line" is {at, value}; `paint` is a colour of report.css, `look` a pattern or a shape
//   marks:  [{at, text, side}] lines across `along`;  levels: [{value, text}] lines across `up`
//   hits:   [{from, to, tip, pick}] columns that show a tip, and call `pick` when they are clicked
const Charts = (() => {
  const NAMESPACE = "http://www.w3.org/2000/svg";
  const LETTER = 6.7; // pixels of a letter, on average
  const SHAPES = [
    (x, y, r) => `M${x - r} ${y}a${r} ${r} 0 1 0 ${2 * r} 0a${r} ${r} 0 1 0 ${-2 * r} 0Z`, // circle
    (x, y, r) => `M${x} ${y - 1.3 * r}L${x + 1.3 * r} ${y}L${x} ${y + 1.3 * r}L${x - 1.3 * r} ${y}Z`, // diamond
    (x, y, r) => `M${x - r} ${y - r}H${x + r}V${y + r}H${x - r}Z`, // square
    (x, y, r) => `M${x} ${y - 1.2 * r}L${x + 1.2 * r} ${y + r}H${x - 1.2 * r}Z`, // triangle
    (x, y, r) => `M${x - r} ${y - r}L${x + r} ${y + r}M${x + r} ${y - r}L${x - r} ${y + r}`, // cross
    (x, y, r) => `M${x - 1.3 * r} ${y}H${x + 1.3 * r}M${x} ${y - 1.3 * r}V${y + 1.3 * r}`, // plus
  ];
  const PATTERNS = ["", "M-2 9L9 -2M-2 2L2 -2M5 9L9 5", "M1.5 3.5h3", "M3.5 0v7", "M-2 -2L9 9M-2 5L2 9M5 -2L9 2", "M0 3.5h7M3.5 0v7"];

  const add = (parent, tag, attributes = {}, text) => {
    const made = document.createElementNS(NAMESPACE, tag);
    for (const [name, value] of Object.entries(attributes)) made.setAttribute(name, value);
    if (text !== undefined) made.textContent = text;
    parent.append(made);
    return made;
  };
  const html = (parent, tag, kind, text) => {
    const made = document.createElement(tag);
    made.className = kind;
    if (text !== undefined) made.textContent = text;
    parent.append(made);
    return made;
  };
  const cut = (text, most) => text.length <= most ? text : `…${text.slice(1 - most)}`;
  const told = (value) => {
    const text = value && (Math.abs(value) >= 1e6 || Math.abs(value) < 1e-3) ? value.toExponential(1).replace(".0e", "e") : Number(value.toPrecision(4)).toLocaleString("en", { maximumFractionDigits: 6 });
    return text.replace("-", "−");
  };
  const powers = "⁰¹²³⁴⁵⁶⁷⁸⁹";
  const ticks = (lo, hi, most, log) => {
    if (log) {
      const first = Math.ceil(Math.log10(lo)), last = Math.floor(Math.log10(hi)), step = Math.max(1, Math.ceil((last - first + 1) / most));
      return Array.from({ length: Math.max(1, Math.floor((last - first) / step) + 1) }, (_, index) => first + index * step)
        .map((power) => ({ at: 10 ** power, text: power < 4 ? told(10 ** power) : `10${[...String(power)].map((digit) => powers[digit]).join("")}` }));
    }
    const raw = (hi - lo) / Math.max(1, most) || 1, ten = 10 ** Math.floor(Math.log10(raw));
    const step = [1, 2, 5, 10].find((factor) => factor * ten >= raw * 0.999) * ten, found = [];
    for (let index = Math.ceil(lo / step - 1e-9); index * step <= hi + step * 1e-9; index += 1) found.push({ at: index * step, text: told(index * step) });
    return found;
  };

  // the fill of a series: a colour, or a colour with a pattern of the colour behind the chart
  const fill = (svg, id, paint, look) => {
    const path = PATTERNS[look % PATTERNS.length];
    if (!path) return `var(--${paint})`;
    const made = add(add(svg, "defs"), "pattern", { id, width: 7, height: 7, patternUnits: "userSpaceOnUse" });
    add(made, "rect", { width: 7, height: 7, fill: `var(--${paint})` });
    add(made, "path", { d: path, stroke: "var(--card)", "stroke-width": 1.8, fill: "none" });
    return `url(#${id})`;
  };
  const keys = (host, series, fills) => {
    const list = html(host, "ul", "keys");
    series.forEach((row, index) => {
      const item = html(list, "li", "key"), svg = add(item, "svg", { viewBox: "0 0 26 14", "aria-hidden": "true" });
      if (row.kind === "bars") add(svg, "rect", { x: 1, y: 1, width: 24, height: 12, fill: fills[index], stroke: `var(--${row.paint})` });
      if (row.kind === "line") add(svg, "path", { class: "line", d: "M1 7H25", stroke: `var(--${row.paint})` });
      if (row.kind === "points") add(svg, "path", { d: SHAPES[row.look % SHAPES.length](13, 7, 4.5), fill: `var(--${row.paint})`, stroke: `var(--${row.paint})` });
      item.append(row.name);
    });
  };

  // the place of the plot in its picture, and the functions from values to pixels
  const frame = (chart, width, height) => {
    const { along, up, flat } = chart, names = along.names, tilted = names && !flat;
    const longest = names ? Math.max(0, ...names.map((name) => name.length)) : 0, letters = flat ? Math.min(longest, Math.floor(width * 0.4 / LETTER)) : Math.min(longest, 18);
    const rows = ticks(up.lo, up.hi, flat ? width / 110 : height / 55, up.log);
    const left = flat ? letters * LETTER + 14 : Math.max(...rows.map((row) => row.text.length)) * LETTER + (up.title ? 38 : 16);
    const bottom = tilted && names.length <= 24 ? Math.min(letters * LETTER * 0.66 + 26, height * 0.45) : (flat ? up.title : along.title) ? 48 : 28;
    const box = { left, right: width - 16, top: chart.marks || chart.levels ? 24 : 10, bottom: height - bottom };
    const scale = (axis, start, end) => {
      const lo = axis.log ? Math.log10(axis.lo) : axis.lo, hi = axis.log ? Math.log10(axis.hi) : axis.hi;
      return (value) => start + (end - start) * ((axis.log ? Math.log10(Math.max(value, axis.lo)) : value) - lo) / (hi - lo || 1);
    };
    const whole = names ? { lo: -0.5, hi: names.length - 0.5 } : along;
    const a = flat ? scale(whole, box.top, box.bottom) : scale(whole, box.left, box.right), u = flat ? scale(up, box.left, box.right) : scale(up, box.bottom, box.top);
    return { ...box, a, u, rows, letters };
  };
  const axes = (svg, chart, at) => {
    const { along, up, flat } = chart, group = add(svg, "g", { class: "axes" });
    for (const row of at.rows) {
      const place = at.u(row.at);
      add(group, "path", { d: flat ? `M${place} ${at.top}V${at.bottom}` : `M${at.left} ${place}H${at.right}` });
      add(group, "text", flat ? { x: place, y: at.bottom + 17, class: "middle" } : { x: at.left - 8, y: place + 4, class: "end" }, row.text);
    }
    if (along.names && (flat || along.names.length <= 24)) along.names.forEach((name, index) => {
      const place = at.a(index), text = cut(name, Math.max(4, at.letters));
      if (flat) add(group, "text", { x: at.left - 8, y: place + 4, class: "end" }, text);
      else add(group, "text", { x: place + 4, y: at.bottom + 16, class: "end", transform: `rotate(-40 ${place + 4} ${at.bottom + 12})` }, text);
    });
    if (!along.names) for (const row of ticks(along.lo, along.hi, (at.right - at.left) / 90)) add(group, "text", { x: at.a(row.at), y: at.bottom + 17, class: "middle" }, row.text);
    const below = flat ? up.title : along.names && along.names.length <= 24 ? "" : along.title, beside = flat ? "" : up.title;
    if (below) add(group, "text", { x: (at.left + at.right) / 2, y: at.bottom + 38, class: "middle title" }, below);
    if (beside) add(group, "text", { x: 14, y: (at.top + at.bottom) / 2, class: "middle title", transform: `rotate(-90 14 ${(at.top + at.bottom) / 2})` }, beside);
  };
  const bars = (group, row, chart, at, paint) => {
    for (const bar of row.values) {
      const a0 = at.a(bar.from), a1 = at.a(bar.to), u0 = at.u(bar.low), u1 = at.u(bar.high);
      const [x, y, w, h] = chart.flat ? [Math.min(u0, u1), a0, Math.abs(u1 - u0), a1 - a0] : [a0, Math.min(u0, u1), a1 - a0, Math.abs(u1 - u0)];
      add(group, "rect", { class: "bar", x, y, width: Math.max(w, 0.5), height: h, fill: bar.paint ? `var(--${bar.paint})` : paint, ...(row.look ? { stroke: `var(--${row.paint})` } : {}) });
    }
  };
  const points = (group, row, chart, at) => {
    const size = (at.right - at.left) / ((chart.along.names || []).length || 1) < 14 ? 3 : 5;
    if (row.kind === "line") add(group, "path", { class: "line", d: row.values.map((point, index) => `${index ? "L" : "M"}${at.a(point.at)} ${at.u(point.value)}`).join(""), stroke: `var(--${row.paint})` });
    else for (const point of row.values) add(group, "path", { class: "point", d: SHAPES[row.look % SHAPES.length](at.a(point.at), at.u(point.value), size), fill: `var(--${row.paint})`, stroke: `var(--${row.paint})` });
  };
  const notes = (svg, chart, at) => {
    for (const mark of chart.marks || []) {
      const x = at.a(mark.at);
      add(svg, "path", { class: "mark", d: `M${x} ${at.top - 6}V${at.bottom}` });
      add(svg, "text", { class: `marked ${mark.side}`, x: x + (mark.side === "end" ? -4 : 4), y: at.top - 8 }, mark.text);
    }
    for (const level of chart.levels || []) {
      add(svg, "path", { class: "mark", d: `M${at.left} ${at.u(level.value)}H${at.right}` });
      add(svg, "text", { class: "marked end", x: at.right, y: at.u(level.value) - 6 }, level.text);
    }
  };
  const tips = (host, svg, chart, at, width) => {
    const tip = html(host, "div", "tip");
    tip.hidden = true;
    const group = add(svg, "g");
    for (const hit of chart.hits || []) {
      const a0 = at.a(hit.from), a1 = at.a(hit.to);
      const column = add(group, "rect", chart.flat ? { x: 0, y: a0, width: at.right, height: a1 - a0 } : { x: a0, y: at.top, width: a1 - a0, height: at.bottom - at.top });
      column.setAttribute("class", hit.pick ? "hit pick" : "hit");
      column.addEventListener("pointerenter", () => {
        tip.textContent = hit.tip;
        tip.hidden = false;
      });
      if (hit.pick) column.addEventListener("click", hit.pick);
    }
    svg.addEventListener("pointermove", (event) => {
      const box = host.getBoundingClientRect(), x = event.clientX - box.left, y = event.clientY - box.top;
      tip.style.left = `${Math.max(0, Math.min(x + 14, width - tip.offsetWidth - 4))}px`;
      tip.style.top = `${Math.max(0, y - tip.offsetHeight - 10)}px`;
    });
    svg.addEventListener("pointerleave", () => { tip.hidden = true; });
  };

  const draw = (host, chart) => {
    host.replaceChildren();
    if (chart.height) host.style.height = `${chart.height}px`;
    const svg = add(host, "svg", { class: "drawn", "aria-hidden": "true" });
    const fills = chart.series.map((row, index) => row.kind === "bars" ? fill(svg, `${host.id}-look-${index}`, row.paint, row.look || 0) : "");
    if (chart.series.length > 1) keys(host, chart.series, fills);
    const list = host.querySelector(".keys");
    if (list) host.prepend(list);
    const width = host.clientWidth || 640, height = Math.max(80, (host.clientHeight || 350) - (list ? list.offsetHeight : 0));
    svg.setAttribute("viewBox", `0 0 ${width} ${height}`);
    svg.style.height = `${height}px`;
    const at = frame(chart, width, height);
    axes(svg, chart, at);
    chart.series.forEach((row, index) => {
      const group = add(svg, "g", { class: "series" });
      if (row.kind === "bars") bars(group, row, chart, at, fills[index]);
      else points(group, row, chart, at);
    });
    notes(svg, chart, at);
    tips(host, svg, chart, at, width);
  };
  return { draw };
})();
