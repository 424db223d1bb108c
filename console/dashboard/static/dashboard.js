// The pages work without this file; it draws the charts, keeps live numbers live and remembers zone and colors.
"use strict";

const root = document.documentElement;
root.classList.add("scripted");
const color = (name) => getComputedStyle(root).getPropertyValue(name).trim();
const remember = (name, value) => {
  document.cookie = `${name}=${value}; path=/dashboard; max-age=31536000; samesite=lax`;
};

// --- the viewer: time zone and colors ---

function startZone() {
  if (!document.cookie.includes("spillway_zone=")) {
    const zone = Intl.DateTimeFormat().resolvedOptions().timeZone;
    if (zone) {
      remember("spillway_zone", zone);
      if (zone !== root.dataset.zone && document.cookie.includes("spillway_zone=")) location.reload();
    }
  }
  const list = document.getElementById("zones");
  for (const zone of Intl.supportedValuesOf("timeZone")) list?.append(new Option(zone, zone));
}

function startTheme() {
  const button = document.getElementById("theme");
  if (!button) return;
  const isDark = () => (root.dataset.theme ? root.dataset.theme === "dark" : matchMedia("(prefers-color-scheme: dark)").matches);
  const name = () => (button.textContent = isDark() ? "Light" : "Dark");
  button.hidden = false;
  name();
  button.addEventListener("click", () => {
    root.dataset.theme = isDark() ? "light" : "dark";
    remember("spillway_theme", root.dataset.theme);
    name();
    drawAll();
  });
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => { name(); drawAll(); });
}

// --- numbers that live ---

function startLive() {
  if (!document.querySelector("[data-live]")) return;
  const events = new EventSource("/dashboard/live");
  events.onmessage = (event) => {
    const texts = JSON.parse(event.data);
    for (const place of document.querySelectorAll("[data-live]")) {
      const text = texts[place.dataset.live];
      if (text !== undefined && place.textContent !== text) place.textContent = text;
    }
  };
  addEventListener("pagehide", () => events.close());
}

// --- charts ---

const zone = root.dataset.zone || "UTC";
const clock = new Intl.DateTimeFormat("en-GB", { timeZone: zone, hour: "2-digit", minute: "2-digit", hourCycle: "h23" });
const day = new Intl.DateTimeFormat("en-GB", { timeZone: zone, day: "numeric", month: "short" });
const whole = new Intl.NumberFormat("en-US", { maximumFractionDigits: 1 });
const short = new Intl.NumberFormat("en-US", { notation: "compact", maximumSignificantDigits: 3 });

function amount(value, unit) {
  if (value === null || value === undefined) return "–";
  if (unit === "ms") {
    if (value < 1000) return `${value < 10 ? value.toFixed(value ? 1 : 0) : Math.round(value)} ms`;
    return value < 120000 ? `${Number((value / 1000).toPrecision(3))} s` : `${Number((value / 60000).toPrecision(3))} min`;
  }
  if (unit === "USD") return `$${value && value < 1 ? value.toPrecision(2) : whole.format(value)}`;
  return Math.abs(value) >= 10000 ? short.format(value) : whole.format(value);
}

const times = (isDaily) => (_chart, splits) => {
  let last = "";
  return splits.map((split) => {
    const date = new Date(split * 1000);
    const today = day.format(date);
    const text = isDaily ? today : today === last ? clock.format(date) : `${clock.format(date)}\n${today}`;
    last = today;
    return text;
  });
};

// Stacked bars reach from zero to their top, the highest first, so that each covers the lower part of the one before.
function piled(lines) {
  let below = lines[0].values.map(() => 0);
  const stacked = lines.filter((line) => line.stacked).map((line) => {
    below = below.map((sum, index) => sum + (line.values[index] || 0));
    return { ...line, own: line.values, values: below };
  });
  return [...stacked.reverse(), ...lines.filter((line) => !line.stacked)];
}

function lineOf(line, unit) {
  const stroke = color(`--series-${line.color}`);
  // Nowhere under the pointer: the latest value and the largest.
  const rest = (values) => {
    const known = (values ?? []).filter((one) => one !== null && one !== undefined);
    return known.length ? `${amount(known.at(-1), unit)} (max ${amount(Math.max(...known), unit)})` : "–";
  };
  const value = (chart, number, series, index) => (index === null || index === undefined ? rest(line.own ?? chart.data?.[series]) : amount(line.own ? line.own[index] : number, unit));
  const common = { label: line.name, stroke, value, width: 1.75, points: { show: line.gaps, size: 5, fill: stroke }, spanGaps: false };
  if (line.stepped) return { ...common, paths: uPlot.paths.stepped({ align: 1 }) };
  if (!line.bars) return { ...common, fill: line.fill ? `${stroke}22` : undefined };
  return { ...common, width: 0, fill: stroke, paths: uPlot.paths.bars({ size: [0.8, 40] }) };
}

function draw(figure) {
  const place = figure.querySelector(".plot");
  const data = JSON.parse(figure.querySelector("script").textContent);
  const isDaily = data.step === "day";
  const lines = piled(data.lines);
  const x = data.edges.slice(0, -1).map((edge) => edge / 1000);
  const axis = { stroke: color("--quiet"), grid: { stroke: color("--line"), width: 1 }, ticks: { show: false }, font: "12px system-ui, sans-serif" };
  const options = {
    width: place.clientWidth,
    height: figure.classList.contains("short") ? 150 : 220,
    padding: [8, 22, 0, 0],
    tzDate: (seconds) => uPlot.tzDate(new Date(seconds * 1000), zone),
    cursor: { drag: { x: true, y: false, setScale: false }, points: { size: 6 }, sync: { key: "page", setSeries: false } },
    scales: { x: { time: true, range: [x[0], data.edges.at(-1) / 1000] }, y: { range: (_chart, _low, high) => [0, high > 0 ? high * 1.1 : 1] } },
    axes: [
      { ...axis, values: times(isDaily), space: 64, size: 42 },
      { ...axis, values: (_chart, splits) => splits.map((split) => amount(split, data.unit)), size: 62, incrs: data.whole ? [1, 2, 5, 10, 20, 50, 100, 200, 500, 1e3, 2e3, 5e3, 1e4, 2e4, 5e4, 1e5, 2e5, 5e5, 1e6, 2e6, 5e6, 1e7, 2e7, 5e7, 1e8, 2e8, 5e8, 1e9] : undefined },
    ],
    series: [
      { label: "From", value: (_chart, seconds, _series, index) => (index === null || index === undefined ? "latest" : seconds ? `${day.format(new Date(seconds * 1000))}${isDaily ? "" : ` ${clock.format(new Date(seconds * 1000))}`}` : "–") },
      ...lines.map((line) => lineOf(line, data.unit)),
    ],
    hooks: { setSelect: [(chart) => zoom(chart, data)], draw: [(chart) => drawMarks(chart, data.marks)] },
  };
  place.replaceChildren();
  const chart = new uPlot(options, [x, ...lines.map((line) => line.values)], place);
  let pressed = 0;
  chart.over.addEventListener("mousedown", (event) => (pressed = event.clientX));
  chart.over.addEventListener("click", (event) => {
    const index = chart.cursor.idx;
    if (Math.abs(event.clientX - pressed) < 4 && index !== null && data.drill) location.href = `${data.drill}&since=${data.edges[index]}&until=${data.edges[index + 1]}`;
  });
  figure.chart = chart;
  // The legend keeps its height, so that nothing below it moves.
  const legend = place.querySelector(".u-legend");
  chart.setLegend({ idx: null }, false);
  legend.style.minHeight = `${Math.ceil(legend.getBoundingClientRect().height)}px`;
}

// Moments at which machines were lost: a dashed line under a triangle.
function drawMarks(chart, marks) {
  const { ctx, bbox } = chart;
  const size = 5 * devicePixelRatio;
  ctx.save();
  ctx.strokeStyle = ctx.fillStyle = color("--bad");
  ctx.lineWidth = devicePixelRatio;
  ctx.setLineDash([2 * devicePixelRatio, 4 * devicePixelRatio]);
  for (const mark of marks) {
    const x = Math.round(chart.valToPos(mark / 1000, "x", true));
    ctx.beginPath();
    ctx.moveTo(x, bbox.top);
    ctx.lineTo(x, bbox.top + bbox.height);
    ctx.stroke();
    ctx.beginPath();
    ctx.moveTo(x - size, bbox.top);
    ctx.lineTo(x + size, bbox.top);
    ctx.lineTo(x, bbox.top + 1.5 * size);
    ctx.fill();
  }
  ctx.restore();
}

function zoom(chart, data) {
  const { left, width } = chart.select;
  if (width < 8) return;
  const [from, until] = [left, left + width].map((position) => chart.posToIdx(position));
  const url = new URL(location.href);
  for (const name of ["range", "month", "until"]) url.searchParams.delete(name);
  url.searchParams.set("since", data.edges[from]);
  url.searchParams.set("until", data.edges[Math.max(until, from + 1)]);
  location.href = url;
}

function drawAll() {
  for (const figure of document.querySelectorAll("[data-chart]")) if (figure.querySelector("script")) draw(figure);
}

function startCharts() {
  drawAll();
  // Percentiles are loaded after the page.
  document.addEventListener("htmx:after:swap", () => {
    for (const figure of document.querySelectorAll("[data-chart]")) if (!figure.chart && figure.querySelector("script")) draw(figure);
  });
  let waiting = 0;
  addEventListener("resize", () => {
    clearTimeout(waiting);
    waiting = setTimeout(() => {
      for (const figure of document.querySelectorAll("[data-chart]")) {
        figure.chart?.setSize({ width: figure.querySelector(".plot").clientWidth, height: figure.chart.height });
      }
    }, 100);
  });
}

// --- tables ---

const UNITS = { ms: 1, s: 1e3, min: 6e4, h: 3.6e6, K: 1e3, M: 1e6, B: 1e9 };

function sortKey(cell) {
  const text = cell?.textContent.trim() ?? "";
  const found = /^[≈$\s]*(-?[\d,]+(?:\.\d+)?(?:e[-+]?\d+)?)\s*(ms|s|min|h|K|M|B)?\b/.exec(text);
  return cell?.classList.contains("num") ? (found ? Number(found[1].replaceAll(",", "")) * (UNITS[found[2]] ?? 1) : -Infinity) : text.toLowerCase();
}

function sortBy(header, column) {
  const body = header.closest("table").tBodies[0];
  const isDown = header.getAttribute("aria-sort") !== "descending" && (header.classList.contains("num") || header.hasAttribute("aria-sort"));
  for (const other of header.parentElement.children) other.removeAttribute("aria-sort");
  header.setAttribute("aria-sort", isDown ? "descending" : "ascending");
  const keyed = [...body.rows].filter((row) => row.cells.length > column).map((row) => [sortKey(row.cells[column]), row]);
  keyed.sort(([one], [other]) => (one < other ? -1 : one > other ? 1 : 0) * (isDown ? -1 : 1));
  body.prepend(...keyed.map(([, row]) => row));
}

function startTables() {
  for (const table of document.querySelectorAll("table[data-sort]")) {
    [...table.tHead.rows[0].cells].forEach((header, column) => {
      const button = document.createElement("button");
      button.type = "button";
      button.className = "sort";
      button.append(...header.childNodes);
      button.addEventListener("click", () => sortBy(header, column));
      header.append(button);
    });
  }
}

// --- refresh ---

function startRefresh() {
  const seconds = Number(document.querySelector("[data-refresh]")?.dataset.refresh);
  if (!seconds) return;
  // Not while the user types or has a part of the page open.
  const isBusy = () => document.hidden || document.querySelector("details[open]") || document.activeElement?.matches("input, select, textarea");
  setInterval(() => { if (!isBusy()) location.reload(); }, seconds * 1000);
}

// --- small things ---

function startForms() {
  for (const select of document.querySelectorAll("select[data-submit]")) select.addEventListener("change", () => select.form.requestSubmit());
  for (const button of document.querySelectorAll("[data-copy]")) {
    button.hidden = false;
    button.addEventListener("click", async () => {
      await navigator.clipboard.writeText(document.getElementById(button.dataset.copy).textContent.trim());
      button.textContent = "Copied";
    });
  }
  for (const form of document.querySelectorAll("form[data-confirm]")) {
    form.addEventListener("submit", (event) => { if (!confirm(form.dataset.confirm)) event.preventDefault(); });
  }
  addEventListener("keydown", (event) => {
    if (event.key === "Escape") for (const menu of document.querySelectorAll(".menu[open]")) { menu.open = false; menu.querySelector("summary").focus(); }
  });
}

document.querySelector("nav [aria-current]")?.scrollIntoView({ block: "nearest", inline: "center" });
startZone();
startTheme();
startCharts();
startLive();
startRefresh();
startTables();
startForms();
