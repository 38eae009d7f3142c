"use strict";
// The figures are Plotly's data and layout by the id of their element. An engine's name stands in its table rows and
// timelines as data-engine and in its lines as meta.engine.
(async () => {
  const figures = JSON.parse(document.getElementById("figures").textContent);
  const boxes = [...document.querySelectorAll("#filter input")];
  const PREFIX = "#engines=";

  const decoded = (text) => {
    try {
      return decodeURIComponent(text);
    } catch {
      return text;
    }
  };

  // "ring" stands for "ring:contiguous" too.
  const readFragment = () => {
    if (!location.hash.startsWith(PREFIX)) {
      boxes.forEach((box) => { box.checked = true; });
      return;
    }
    const names = location.hash.slice(PREFIX.length).split(",").map(decoded);
    for (const box of boxes) {
      const engine = box.dataset.engine;
      box.checked = names.some((name) => name === engine || (name !== "" && engine.startsWith(`${name}:`)));
    }
  };

  const writeFragment = () => {
    const chosen = boxes.filter((box) => box.checked).map((box) => encodeURIComponent(box.dataset.engine));
    const all = chosen.length === boxes.length;
    history.replaceState(null, "", all ? location.pathname + location.search : PREFIX + chosen.join(","));
  };

  const shown = () => new Set(boxes.filter((box) => box.checked).map((box) => box.dataset.engine));

  const draw = async (plot) => {
    const figure = figures[plot.id];
    await Plotly.newPlot(plot, figure.data, figure.layout, { responsive: true, displaylogo: false });
  };

  // One change may come while another is being drawn: the last one to be asked for is the one that stays.
  let latest = 0;
  const apply = async () => {
    const own = ++latest;
    const engines = shown();
    document.querySelectorAll("tr[data-engine], .timeline[data-engine]").forEach((element) => {
      element.hidden = !engines.has(element.dataset.engine);
    });
    for (const plot of document.querySelectorAll(".plot")) {
      if (own !== latest) return;
      if (plot.closest("[hidden]:not(.plot)")) continue;
      const lines = figures[plot.id].data.filter((trace) => trace.meta);
      const visible = lines.map((trace) => engines.has(trace.meta.engine));
      const empty = lines.length > 0 && !visible.includes(true);
      plot.hidden = empty;
      if (lines.length > 0) plot.nextElementSibling.hidden = !empty;
      if (empty) continue;
      // An element that was hidden has no width to draw to, so a plot is drawn when it is first shown.
      if (!plot.data) await draw(plot);
      else Plotly.Plots.resize(plot);
      if (lines.length > 0) await Plotly.restyle(plot, { visible });
    }
    // Says that all is drawn, and for which engines.
    if (own === latest) document.body.dataset.engines = JSON.stringify([...engines]);
  };

  boxes.forEach((box) => box.addEventListener("change", () => { writeFragment(); apply(); }));
  window.addEventListener("hashchange", () => { readFragment(); apply(); });
  readFragment();
  await apply();
})();
