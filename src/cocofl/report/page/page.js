// Draws the charts when they come into view, in the page's colours, and shows and hides lines.
"use strict";
(() => {
  const charts = JSON.parse(document.getElementById("charts").textContent);
  const onDark = JSON.parse(document.getElementById("on-dark").textContent);
  const dark = matchMedia("(prefers-color-scheme: dark)");
  const touch = matchMedia("(pointer: coarse)").matches;
  const hidden = new Set();
  const drawn = new Set();

  const css = (name) => getComputedStyle(document.documentElement).getPropertyValue(name).trim();

  // Colours are written for a light page; on a dark one each has a twin.
  function recolour(value) {
    if (typeof value === "string") return (dark.matches && onDark[value]) || value;
    if (Array.isArray(value)) return value;
    if (value && typeof value === "object") {
      return Object.fromEntries(Object.entries(value).map(([key, item]) =>
        [key, ["x", "y", "z", "text", "customdata", "meta"].includes(key) ? item : recolour(item)]));
    }
    return value;
  }

  function traces(chart) {
    return chart.data.map((trace) => {
      const shown = recolour(trace);
      if (shown.type === "heatmap") {
        shown.colorscale = [[0, css("--page")], [1, css("--accent")]];
        shown.colorbar = {...shown.colorbar, outlinewidth: 0};
      }
      shown.visible = !(trace.meta && hidden.has(trace.meta.line));
      return shown;
    });
  }

  function layout(place, chart) {
    const narrow = place.clientWidth < 520;
    const axis = {gridcolor: css("--grid"), linecolor: css("--edge"), zerolinecolor: css("--grid"),
                  automargin: true, fixedrange: touch};
    const merged = {
      showlegend: false, font: {color: css("--ink"), size: narrow ? 11 : 12, family: "system-ui, sans-serif"},
      paper_bgcolor: "rgba(0,0,0,0)", plot_bgcolor: "rgba(0,0,0,0)",
      margin: {l: 44, r: 10, t: 8, b: 40}, hovermode: "closest", dragmode: touch ? false : "zoom",
      legend: {orientation: "h", y: 1.02, yanchor: "bottom", x: 0, itemsizing: "constant"},
      modebar: {bgcolor: "rgba(0,0,0,0)", color: css("--soft"), activecolor: css("--accent")},
      hoverlabel: {bgcolor: css("--card"), bordercolor: css("--edge"), font: {color: css("--ink")}},
      ...chart.layout,
    };
    for (const key of ["xaxis", "yaxis"]) merged[key] = {...axis, ...chart.layout[key]};
    return merged;
  }

  function draw(place) {
    const chart = charts[place.id];
    drawn.add(place);
    return Plotly.react(place, traces(chart), layout(place, chart),
                        {responsive: true, displaylogo: false, displayModeBar: touch ? false : "hover",
                         modeBarButtonsToRemove: ["select2d", "lasso2d", "autoScale2d"]});
  }

  const places = [...document.querySelectorAll(".chart")];
  const watcher = new IntersectionObserver((entries) => {
    for (const entry of entries) {
      if (entry.isIntersecting) {
        watcher.unobserve(entry.target);
        setTimeout(draw, 0, entry.target); // one by one: the first is seen while others are drawn
      }
    }
  }, {rootMargin: "300px"});
  places.forEach((place) => watcher.observe(place));

  const redraw = () => drawn.forEach(draw);

  function paintChips() {
    document.querySelectorAll("[data-colour]").forEach((dot) => {
      const colour = (dark.matches && onDark[dot.dataset.colour]) || dot.dataset.colour;
      dot.style.background = colour;
      dot.style.borderColor = colour;
    });
  }

  document.querySelectorAll(".chips button").forEach((chip) => {
    chip.addEventListener("click", () => {
      const line = chip.dataset.line;
      const show = hidden.delete(line) || (hidden.add(line), false);
      chip.setAttribute("aria-pressed", String(show));
      document.querySelectorAll("[data-of]").forEach((part) => {
        part.hidden = hidden.has(part.dataset.of);
      });
      redraw();
    });
  });
  // A click on a heading sorts by it, largest first; another one turns that around.
  document.querySelectorAll(".sortable th button").forEach((button) => {
    button.addEventListener("click", () => {
      const heading = button.parentElement, body = heading.closest("table").tBodies[0];
      const at = heading.cellIndex, up = heading.getAttribute("aria-sort") === "descending";
      heading.parentElement.querySelectorAll("th").forEach((one) => one.removeAttribute("aria-sort"));
      heading.setAttribute("aria-sort", up ? "ascending" : "descending");
      const order = new Intl.Collator("en", {numeric: true}).compare;
      const value = (row) => row.cells[at].textContent;
      const number = (text) => parseFloat(text.replace("round ", ""));
      const compare = (a, b) => {
        const [x, y] = [number(value(a)), number(value(b))];
        if (isNaN(x) || isNaN(y)) return isNaN(x) && isNaN(y) ? order(value(a), value(b)) : isNaN(x) - isNaN(y);
        return up ? x - y : y - x;
      };
      body.append(...[...body.rows].sort(compare));
    });
  });
  dark.addEventListener("change", () => { paintChips(); redraw(); });
  // A printed page shows everything, also what was never scrolled to.
  addEventListener("beforeprint", () => places.forEach(draw));
  paintChips();
})();
