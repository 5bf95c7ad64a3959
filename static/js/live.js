// What a running job changes on its open page: figures, bars and the title from its events, and the end of its log.
(() => {
  const $ = (selector) => document.querySelector(selector);
  const $$ = (selector) => [...document.querySelectorAll(selector)];

  // --- live: named SSE events arrive as DOM events; `metric` carries {"step": 12, "train_loss": 0.8, ...} ---
  const FORMATS = {
    int: (v) => Math.round(v).toLocaleString("en"),
    percent: (v) => String(Math.round(v)),
    exp: (v) => v.toExponential(2),
    usd: (v) => dollars(v / 1e9),
    duration: (v) => (v < 60 ? `${Math.round(v)}s` : v < 3600 ? `${Math.floor(v / 60)}m ${String(Math.round(v % 60)).padStart(2, "0")}s` : `${Math.floor(v / 3600)}h ${String(Math.floor((v % 3600) / 60)).padStart(2, "0")}m`),
    about: (v) => (v < 60 ? "under 1 min" : v < 3570 ? `${Math.round(v / 60)} min` : FORMATS.duration(Math.round(v / 60) * 60)),
  };
  const dollars = (v, cents = Number((v * 100).toPrecision(2))) => (v > 0 && cents < 1 ? `${cents.toFixed(10).replace(/0+$/, "")}¢` : `$${v.toLocaleString("en", { minimumFractionDigits: 2, maximumFractionDigits: 2 })}`);
  const written = (value, format) => (typeof value !== "number" ? String(value) : FORMATS[format]?.(value) ?? value.toFixed(Number(format?.replace("fixed", "") || 0)));
  document.addEventListener("metric", (e) => {
    const data = typeof e.detail.data === "string" ? JSON.parse(e.detail.data) : e.detail.data;
    for (const [key, value] of Object.entries(data)) {
      if (value == null) continue;
      $$(`[data-live="${CSS.escape(key)}"]`).forEach((n) => { n.textContent = written(value, n.dataset.format); });
      $$(`[data-live-width="${CSS.escape(key)}"]`).forEach((n) => {
        n.setAttribute("width", value);
        n.closest("[role=progressbar]")?.setAttribute("aria-valuenow", Math.round(value));
      });
    }
    if (data.percent != null && $("[data-live-title]")) document.title = `${Math.round(data.percent)}% ${document.title.replace(/^\d+% /, "")}`;
  });
  const lost = (on) => $$("[data-live-lost]").forEach((n) => { n.hidden = !on; });
  document.addEventListener("htmx:sse:error", () => lost(true));
  // a page that is refused, because too many are open or the server is busy, says so and asks again
  let isTold = false;
  document.addEventListener("htmx:before:response", async (e) => {
    const { ctx } = e.detail, { status, raw } = ctx.response, source = ctx.sourceElement;
    if (!source?.hasAttribute?.("hx-sse:connect") || (status !== 429 && status < 500)) return;
    e.preventDefault();
    lost(true);
    const seconds = Number(raw.headers.get("Retry-After")) || 30;
    setTimeout(() => { if (source.isConnected) htmx.ajax("GET", source.getAttribute("hx-sse:connect"), { source }); }, seconds * 1000);
    if (isTold) return;
    isTold = true;
    const text = new DOMParser().parseFromString(await raw.text(), "text/html").querySelector("h1 + p")?.textContent.trim();
    if (text) document.dispatchEvent(new CustomEvent("toast", { detail: { text, tone: "error" } }));
  });
  document.addEventListener("htmx:sse:before:connection", (e) => { if (e.detail.connection.attempt > 0) lost(true); });
  document.addEventListener("htmx:sse:after:connection", () => lost(false));

  // --- logs grow by `beforeend` swaps: keep the newest lines, follow unless the reader scrolled up ---
  document.addEventListener("htmx:before:swap", () => $$("[data-log]").forEach((n) => { n.dataset.follow = n.scrollHeight - n.scrollTop - n.clientHeight < 40 ? "1" : ""; }));
  document.addEventListener("htmx:after:swap", () => $$("[data-log]").forEach((n) => {
    while (n.childElementCount > Number(n.dataset.log || 2000)) n.firstElementChild.remove();
    if (n.dataset.follow) n.scrollTop = n.scrollHeight;
  }));
  $$("[data-log]").forEach((n) => { n.scrollTop = n.scrollHeight; });
})();
