// Says which spans of a table fit what the sliders give, as cocofl.feasible and cocofl.maximal do.
"use strict";
(() => {
  const {tables, limits} = JSON.parse(document.getElementById("data").textContent);
  const LIMITS = ["time", "memory", "upload"];
  const at = (id) => document.getElementById(id);
  let table, fitting, best, chosen = 0, places = new Map();

  const options = (select, names) => select.replaceChildren(...names.map(([value, text]) => new Option(text, value)));
  const percent = (share) => `${(100 * share).toPrecision(share < 0.1 ? 2 : 3)} %`;
  function bytes(count) {
    for (const [unit, size] of [["GB", 1e9], ["MB", 1e6], ["kB", 1e3]]) if (count >= size) return `${(count / size).toPrecision(3)} ${unit}`;
    return `${Math.round(count)} B`;
  }
  function amount(what, share) {
    const full = table.full[what];
    if (full === null) return "";
    return what === "time" ? `${(1e3 * share * full).toPrecision(3)} ms a step` : bytes(share * full);
  }
  const cost = (what, share) => [percent(share), amount(what, share)].filter(Boolean).join(", ");
  const name = (i) => table.spans[i].join(":");
  // Blocks before a span run forward only, those after it pass gradients.
  const chain = ([start, stop]) => "░".repeat(start) + "█".repeat(stop - start) + "▒".repeat(table.blocks - stop);
  const state = (i) => best.has(i) ? "maximal" : fitting.has(i) ? "fits" : "does not fit";

  function judge() {
    const most = LIMITS.map((what) => Number(at(what).value) / 100);
    // The far end of a slider is no limit.
    const within = (what, i, k) => most[k] >= 1 || table[what][i] <= most[k] + 1e-9;
    fitting = new Set([...table.spans.keys()].filter((i) => LIMITS.every((what, k) => within(what, i, k))));
    const inside = ([a, b], [c, d]) => c <= a && b <= d && d - c > b - a;
    best = new Set([...fitting].filter((i) => ![...fitting].some((j) => inside(table.spans[i], table.spans[j]))));
    LIMITS.forEach((what, k) => {
      const said = most[k] >= 1 ? "no limit" : cost(what, most[k]);
      at(`${what}-said`).textContent = said;
      at(what).setAttribute("aria-valuetext", said);
    });
    at("fit").textContent = fitting.size
      ? `${fitting.size} of ${table.spans.length} spans fit; ${best.size} ${best.size === 1 ? "is" : "are"} maximal.`
      : `None of ${table.spans.length} spans fits. The cheapest in time, ${name(cheapest())}, needs ${needs(cheapest())}.`;
    paint();
  }
  const cheapest = () => table.time.indexOf(Math.min(...table.time));
  const needs = (i) => LIMITS.map((what) => `${what} ${cost(what, table[what][i])}`).join("; ");

  function paint() {
    for (const [i, cell] of places) {
      cell.className = `span ${best.has(i) ? "best" : fitting.has(i) ? "fits" : "no"}`;
      cell.setAttribute("aria-label", `span ${name(i)}, ${state(i)}`);
      cell.setAttribute("aria-selected", String(i === chosen));
      cell.tabIndex = i === chosen ? 0 : -1;
    }
    const about = document.createElement("span");
    about.className = "chain";
    about.textContent = chain(table.spans[chosen]);
    at("chosen").replaceChildren(`Span ${name(chosen)} ${state(chosen) === "maximal" ? "is maximal" : state(chosen)}. It needs ${needs(chosen)}. `, about);
    at("best").tBodies[0].replaceChildren(...[...best].map((i) => {
      const [start, stop] = table.spans[i];
      const row = document.createElement("tr");
      for (const text of [name(i), stop - start, ...LIMITS.map((what) => cost(what, table[what][i])), chain([start, stop])]) {
        row.insertCell().textContent = text;
      }
      row.lastChild.className = "chain";
      return row;
    }));
  }

  function choose(i, focus) {
    chosen = i;
    paint();
    if (focus) places.get(i).focus();
  }

  function lay() {
    const index = new Map(table.spans.map(([a, b], i) => [`${a}:${b}`, i]));
    const corner = document.createElement("th");
    const head = document.createElement("tr");
    const label = (text) => Object.assign(document.createElement("th"), {textContent: text, scope: "col"});
    head.append(corner, ...Array.from({length: table.blocks}, (_, block) => label(block)));
    places = new Map();
    const rows = Array.from({length: table.blocks}, (_, start) => {
      const row = document.createElement("tr");
      row.append(Object.assign(label(start), {scope: "row"}));
      for (let last = 0; last < table.blocks; last++) {
        const cell = row.insertCell();
        const i = index.get(`${start}:${last + 1}`);
        if (i === undefined) continue;
        cell.setAttribute("role", "gridcell");
        cell.addEventListener("click", () => choose(i, true));
        cell.addEventListener("keydown", (event) => {
          const step = {ArrowLeft: [0, -1], ArrowRight: [0, 1], ArrowUp: [-1, 0], ArrowDown: [1, 0]}[event.key];
          if (!step) return;
          event.preventDefault();
          const next = index.get(`${start + step[0]}:${last + 1 + step[1]}`);
          if (next !== undefined) choose(next, true);
        });
        places.set(i, cell);
      }
      return row;
    });
    at("map").replaceChildren(head, ...rows);
    at("map").style.setProperty("--columns", table.blocks + 1);
    chosen = index.get(`${table.blocks - 1}:${table.blocks}`) ?? 0;
  }

  function take() {
    table = tables[Number(at("table").value)];
    at("about").textContent = table.about;
    lay();
    judge();
  }
  // What a list offers follows from what is chosen in those before it.
  const distinct = (what, some) => [...new Set(some.map((one) => one[what]))].map((one) => [one, one]);
  const asked = (...whats) => tables.filter((one) => whats.every((what) => one[what] === at(what).value));
  function listDevices() {
    options(at("device"), distinct("device", asked("model")));
    listTables();
  }
  function listTables() {
    options(at("table"), asked("model", "device").map((one) => [tables.indexOf(one), one.name]));
    take();
  }

  options(at("model"), distinct("model", tables));
  for (const what of LIMITS) {
    at(what).value = Math.round(100 * limits[what]);
    at(what).addEventListener("input", judge);
  }
  at("model").addEventListener("change", listDevices);
  at("device").addEventListener("change", listTables);
  at("table").addEventListener("change", take);
  document.querySelector("form").addEventListener("submit", (event) => event.preventDefault());
  listDevices();
})();
