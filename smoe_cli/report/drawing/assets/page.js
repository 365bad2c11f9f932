"use strict";
// Draws the charts of the report: a figure when it comes near the window, again when its view or the colours change.
(() => {
  const darkness = matchMedia("(prefers-color-scheme: dark)");
  const PRINTED_WIDTH = 660;
  const LEAST_WIDTH = 240; // under this no axis has a place
  let loading = null; // promise of the figures, once the library runs
  let figures = null; // chart name -> {views, square, height}
  let printing = false;

  async function unpack(id) {
    const packed = atob(document.getElementById(id).textContent);
    const bytes = new Uint8Array(packed.length);
    for (let i = 0; i < packed.length; i++) bytes[i] = packed.charCodeAt(i);
    return new Response(new Blob([bytes]).stream().pipeThrough(new DecompressionStream("deflate"))).text();
  }

  function load() {
    loading ??= (async () => {
      const [library, drawn] = await Promise.all([unpack("library"), unpack("figures")]);
      const script = document.createElement("script");
      script.textContent = library; // the page's policy knows its hash
      document.head.append(script);
      figures = JSON.parse(drawn);
    })();
    return loading;
  }

  const isNumber = (value) => typeof value === "number";

  /** A copy with every `var(--name)` replaced by its colour now. */
  function resolve(value, style) {
    if (typeof value === "string") {
      return value.startsWith("var(--") ? style.getPropertyValue(value.slice(4, -1)).trim() : value;
    }
    if (Array.isArray(value)) {
      return value.length > 1 && value.every(isNumber) ? value : value.map((item) => resolve(item, style));
    }
    if (value === null || typeof value !== "object") return value;
    return Object.fromEntries(Object.entries(value).map(([key, item]) => [key, resolve(item, style)]));
  }

  /** What is said of a pair of experts, cell by cell. */
  function pairTexts(cells, { rank, experts, chance, factor }) {
    const name = (at) => `expert ${experts[at]} (rank ${rank[at]})`;
    return cells.map((row, i) => row.map((value, j) => {
      if (value === null) return `${name(i)}`;
      return `${name(i)}<br>with ${name(j)}<br>${(factor ** (value / chance - 1)).toFixed(2)}× chance`;
    }));
  }

  function layoutOf(figure, chart, width) {
    const narrow = width < 480;
    const axis = { gridcolor: "var(--grid)", zerolinecolor: "var(--grid)", linecolor: "var(--border)", automargin: true };
    const base = {
      width,
      height: chart.square ? Math.min(width - 40, 480) : chart.height,
      margin: { l: 44, r: 12, t: 12, b: 40 },
      paper_bgcolor: "rgba(0,0,0,0)",
      plot_bgcolor: "rgba(0,0,0,0)",
      font: { family: "system-ui, sans-serif", size: narrow ? 11 : 12, color: "var(--ink)" },
      hoverlabel: { bgcolor: "var(--raised)", bordercolor: "var(--border)", font: { color: "var(--ink)", size: 13 }, align: "left" },
      legend: { orientation: "h", y: 1.02, yanchor: "bottom", x: 0, font: { size: narrow ? 11 : 12 } },
      dragmode: matchMedia("(pointer: fine)").matches ? "zoom" : false,
    };
    const own = figure.layout;
    const legends = own.showlegend === false ? 0 : figure.data.filter((trace) => trace.name && trace.showlegend !== false).length;
    if (legends > 1) base.height += 18 * Math.ceil(legends / (narrow ? 1 : 4)); // a legend takes nothing from its plot
    if (narrow) Object.assign(base.legend, { y: -0.22, yanchor: "top" });
    const layout = { ...base, ...own };
    for (const key of ["xaxis", "yaxis", "xaxis2"]) {
      const mine = own[key] ?? {};
      const title = typeof mine.title === "string" ? { text: mine.title, standoff: 8, font: { size: base.font.size, color: "var(--muted)" } } : mine.title;
      if (key !== "xaxis2" || own[key]) layout[key] = { ...axis, ...mine, title };
    }
    return layout;
  }

  function draw(place) {
    const chart = figures[place.dataset.chart];
    const figure = chart.views[Number(place.dataset.view ?? 0)];
    const style = getComputedStyle(document.documentElement);
    const width = printing ? PRINTED_WIDTH : Math.max(place.clientWidth, LEAST_WIDTH);
    const data = resolve(figure.data, style);
    if (figure.pairs) data[0].text = pairTexts(data[0].z, figure.pairs);
    const layout = resolve(layoutOf(figure, chart, width), style);
    Plotly.react(place, data, layout, { displayModeBar: false });
    place.dataset.drawn = place.clientWidth;
  }

  const places = [...document.querySelectorAll("div[data-chart]")];
  const drawn = () => places.filter((place) => place.dataset.drawn);

  function fail(error) {
    const note = document.getElementById("failure");
    note.textContent = `The charts could not be drawn (${error.message}); the tables hold the same figures.`;
    note.hidden = false;
  }

  const near = new IntersectionObserver((entries) => {
    for (const { isIntersecting, target } of entries) {
      if (!isIntersecting) continue;
      near.unobserve(target);
      load().then(() => draw(target)).catch(fail);
    }
  }, { rootMargin: "600px 0px" });
  places.forEach((place) => near.observe(place));

  for (const chooser of document.querySelectorAll("select[data-section], select[data-chart]")) {
    const { section, chart } = chooser.dataset;
    chooser.value = "0"; // a reload must not keep a choice that is not drawn
    chooser.addEventListener("change", () => {
      const chosen = chart ? [document.getElementById(`chart-${chart}`)]
        : document.getElementById(section).querySelectorAll("div[data-chart]");
      for (const place of chosen) {
        const views = figures?.[place.dataset.chart]?.views.length ?? Infinity;
        place.dataset.view = Math.min(Number(chooser.value), views - 1);
        if (place.dataset.drawn) draw(place);
      }
    });
  }

  darkness.addEventListener("change", () => drawn().forEach(draw));

  let resizing = 0;
  addEventListener("resize", () => {
    cancelAnimationFrame(resizing);
    resizing = requestAnimationFrame(() => {
      drawn().filter((place) => !printing && Number(place.dataset.drawn) !== place.clientWidth).forEach(draw);
    });
  });

  // On paper everything is to be seen, in light colours: the library is fetched from the page while it idles.
  (window.requestIdleCallback ?? setTimeout)(() => places.length && load().catch(fail));
  addEventListener("beforeprint", () => {
    printing = true;
    document.documentElement.dataset.printing = "";
    for (const details of document.querySelectorAll("details:not([open])")) {
      details.dataset.folded = "";
      details.open = true;
    }
    if (figures) places.forEach(draw);
  });
  addEventListener("afterprint", () => {
    printing = false;
    delete document.documentElement.dataset.printing;
    for (const details of document.querySelectorAll("details[data-folded]")) {
      details.open = false;
      delete details.dataset.folded;
    }
    drawn().forEach(draw);
  });
})();
