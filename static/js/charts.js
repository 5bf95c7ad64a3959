// Live line charts on uPlot: theme colours from the tokens, smoothing, checkpoints, epochs, tooltip, zoom, live append.
// A chart is an element with data-chart and data-src; templates/cotton/chart.html says what the JSON holds.
(() => {
  const $$ = (selector, root = document) => [...root.querySelectorAll(selector)];
  const words = document.querySelector("[data-words=chart]").dataset;
  const probe = document.createElement("span");
  probe.hidden = true;
  document.body.append(probe);
  const colour = (token, share) => {
    probe.style.color = share ? `color-mix(in oklch, var(--${token}) ${share}%, transparent)` : `var(--${token})`;
    return getComputedStyle(probe).color;
  };
  const WRITE = {
    fixed: (v) => v.toFixed(Math.abs(v) < 10 ? 3 : 1),
    exp: (v) => v.toExponential(2),
    int: (v) => Math.round(v).toLocaleString("en"),
  };
  const charts = new WeakMap();

  class Chart {
    constructor(el) {
      this.el = el;
      this.tip = el.querySelector(".chart-tip");
      this.note = el.querySelector("[data-chart-note]");
      this.smooth = 0.8;
      this.log = false;
      this.view = this.viewOf($$(`[data-chart-for="${el.id}"]`).find((n) => n.getAttribute("aria-selected") !== "false"));
      this.load();
    }

    viewOf(tab) {
      const d = tab?.dataset ?? {};
      return { line: d.line ?? "train_loss", dots: d.dots, format: d.format ?? "fixed", smooth: "smooth" in d, name: d.name ?? tab?.textContent.trim() ?? "", dotsName: d.dotsName ?? words.eval, unit: d.unit ?? "" };
    }

    ask() { return fetch(this.el.dataset.src, { headers: { Accept: "application/json" } }); }

    async load() {
      const answer = await this.ask();
      if (!answer.ok) return this.say(words.failed.replace("{status}", answer.status));
      this.data = { x: [], series: {}, epochs: [], checkpoints: [], ...(await answer.json()) };
      this.pending?.forEach((late) => late());
      this.pending = null;
      this.draw();
      new ResizeObserver(() => this.plot?.setSize(this.size())).observe(this.el);
    }

    say(text) {
      this.note.textContent = text;
      this.note.hidden = false;
    }

    size() { return { width: this.el.clientWidth, height: this.el.clientHeight }; }
    column(name) { return (name && this.data.series[name]) || this.data.x.map(() => null); }
    last() { return this.data.x[this.data.x.length - 1]; }

    // time-weighted EMA with debias, the curve W&B shows by default
    smoothed(values) {
      const { x } = this.data, span = this.last() - x[0] || 1, weight = Math.min(Math.sqrt(this.smooth), 0.999);
      let sum = 0, mass = 0, at = x[0];
      return values.map((v, i) => {
        if (v == null) return null;
        const keep = weight ** (((x[i] - at) / span) * 1000);
        at = x[i];
        sum = sum * keep + v;
        mass = mass * keep + 1;
        return sum / mass;
      });
    }

    rows() {
      const line = this.column(this.view.line), blank = line.map(() => null);
      return [this.data.x, this.view.smooth ? line : blank, this.view.smooth ? this.smoothed(line) : line, this.view.dots ? this.column(this.view.dots) : blank];
    }

    // the legend names what this view draws, and nothing else
    legend() {
      const drawn = { line: true, dots: this.column(this.view.dots).some((v) => v != null), checkpoints: Boolean(this.view.dots && this.data.checkpoints.length) };
      $$(`[data-legend-for="${this.el.id}"] [data-legend]`).forEach((n) => {
        n.hidden = !drawn[n.dataset.legend];
        if (n.dataset.legend === "line") n.lastChild.textContent = this.view.name;
      });
    }

    draw() {
      if (!this.data) return;
      this.legend();
      const keep = this.zoomed ? { ...this.plot.scales.x } : null;
      this.plot?.destroy();
      this.plot = null;
      this.note.hidden = this.data.x.length > 0;
      if (!this.data.x.length) return;
      this.plot = new uPlot(this.options(), this.rows(), this.el);
      this.range(keep);
    }

    range(x) {
      this.zoomed = Boolean(x);
      const first = Math.min(0, this.data.x[0]);
      this.plot.setScale("x", { min: x?.min ?? first, max: x?.max ?? Math.max(this.data.total ?? 0, this.last(), first + 1) });
    }

    zoom(factor) {
      const { min, max } = this.plot.scales.x, middle = (min + max) / 2, half = ((max - min) / 2) * factor;
      if (half * 2 >= Math.max(this.data.total ?? 0, this.last())) return this.range(null);
      this.range({ min: Math.max(0, middle - half), max: middle + half });
    }

    options() {
      const axis = { stroke: colour("ink-3"), font: "11px Geist, sans-serif", grid: { stroke: colour("line"), width: 1 }, ticks: { show: false }, gap: 6 };
      const exp = this.view.format === "exp";
      const pad = (u, low, high) => { const room = (high - low) * 0.08 || Math.abs(high) * 0.1 || 1; return [Math.max(0, low - room * 1.6), high + room * 0.4]; };
      const written = (u, splits) => {
        const step = splits.length > 1 ? Math.abs(splits[1] - splits[0]) : 1;
        return splits.map((n) => (n == null ? "" : exp ? n.toExponential(0) : n.toFixed(this.log ? 2 : Math.max(0, Math.min(6, Math.ceil(-Math.log10(step) - 1e-9) + (Math.abs(step * 10 ** Math.ceil(-Math.log10(step) - 1e-9) % 1) > 1e-6 ? 1 : 0))))));
      };
      return {
        ...this.size(), padding: [this.data.epochs.length ? 20 : 10, 14, 0, 0], legend: { show: false },
        plugins: [{ hooks: { draw: [(u) => this.marks(u)], setCursor: [(u) => this.point(u)], setSelect: [() => { this.zoomed = true; }] } }],
        scales: { x: { time: false }, y: this.log ? { distr: 3 } : { range: pad } },
        cursor: { points: { size: 7 }, drag: { x: true, y: false, setScale: true }, y: false },
        axes: [
          { ...axis, size: 26, grid: { show: false }, values: (u, v) => v.map((n) => n.toLocaleString("en")) },
          { ...axis, size: exp ? 54 : 44, values: written, ...(this.view.unit && { label: this.view.unit, labelSize: 18, labelFont: axis.font }) },
        ],
        series: [
          {},
          { stroke: colour("d1", 26), width: 1, points: { show: false }, spanGaps: true },
          { stroke: colour("d1"), width: 2, points: { show: this.data.x.length < 3, size: 6, fill: colour("d1") }, spanGaps: true },
          { stroke: colour("d2", 55), width: 1.25, dash: [3, 3], spanGaps: true, points: { show: true, size: 7, width: 0, fill: colour("d2"), stroke: colour("d2") } },
        ],
      };
    }

    // future shade, epoch lines, checkpoint diamonds, the dot at the newest step
    marks(u) {
      const c = u.ctx, px = devicePixelRatio || 1, { left, top, width, height } = u.bbox;
      const at = (step) => u.valToPos(step, "x", true);
      c.save();
      c.beginPath(); c.rect(left, top, width, height); c.clip();
      const now = at(this.last());
      c.fillStyle = colour("surface-3", 45); c.fillRect(now, top, left + width - now, height);
      c.strokeStyle = colour("line-2"); c.setLineDash([3 * px, 4 * px]); c.lineWidth = px;
      this.data.epochs.forEach((step) => {
        const x = Math.round(at(step)) + 0.5;
        c.beginPath(); c.moveTo(x, top); c.lineTo(x, top + height); c.stroke();
      });
      c.setLineDash([]);
      if (this.view.dots) this.data.checkpoints.forEach((step) => {
        const x = at(step), y = top + height - 9 * px, r = 4.5 * px;
        c.beginPath(); c.moveTo(x, y - r); c.lineTo(x + r, y); c.lineTo(x, y + r); c.lineTo(x - r, y); c.closePath();
        c.fillStyle = colour(step === this.data.best ? "d1" : "surface"); c.fill();
        c.strokeStyle = colour("d1"); c.lineWidth = 1.5 * px; c.stroke();
      });
      const values = u.data[2], end = values[values.length - 1];
      if (end != null && !this.data.finished) {
        const y = u.valToPos(end, "y", true);
        c.beginPath(); c.arc(now, y, 8 * px, 0, 7); c.fillStyle = colour("d1", 18); c.fill();
        c.beginPath(); c.arc(now, y, 3.5 * px, 0, 7); c.fillStyle = colour("d1"); c.fill();
      }
      c.restore();
      // above the plot, where no line runs; only what has room beside the one before
      let free = left;
      c.save();
      c.font = `${11 * px}px Geist, sans-serif`; c.fillStyle = colour("ink-3"); c.textAlign = "left";
      this.data.epochs.forEach((step, i) => {
        const text = words.epoch.replace("{number}", i + 2), x = at(step), room = c.measureText(text).width;
        if (x < free || x + room > left + width + 14 * px) return;
        c.fillText(text, x, top - 5 * px);
        free = x + room + 8 * px;
      });
      c.restore();
    }

    point(u) {
      const i = u.cursor.idx, { x } = this.data, write = WRITE[this.view.format] ?? WRITE.fixed;
      if (i == null || u.cursor.left < 0 || x[i] == null) { this.tip.style.visibility = "hidden"; return; }
      const line = (mark, name, value) => {
        const row = document.createElement("div");
        for (const [className, text] of [[mark, ""], ["", name], ["", value]]) {
          const cell = document.createElement("span");
          cell.className = className;
          cell.textContent = text;
          row.append(cell);
        }
        return row;
      };
      const head = document.createElement("b"), rows = [head], [, raw, main, dots] = u.data;
      head.textContent = words.step.replace("{step}", x[i].toLocaleString("en"));
      if (main[i] != null) rows.push(line("key-line d1", this.view.name, write(main[i])));
      if (raw[i] != null) rows.push(line("key-line d6", words.raw, write(raw[i])));
      let j = i;
      while (j > 0 && dots[j] == null) j--;
      if (dots[j] != null) rows.push(line("key-dot d2", words.at.replace("{step}", x[j].toLocaleString("en")).replace("{name}", this.view.dotsName), write(dots[j])));
      if (this.view.dots && this.data.checkpoints.includes(x[i])) rows.push(line("key-flag d1", words.checkpoint, x[i] === this.data.best ? words.best : words.saved));
      this.tip.replaceChildren(...rows);
      const room = u.over.clientWidth, at = u.cursor.left, off = u.over.offsetLeft;
      this.tip.style.visibility = "visible";
      this.tip.style.top = "10px";
      this.tip.style.left = `${at > room / 2 ? off + at - this.tip.offsetWidth - 14 : off + at + 14}px`;
    }

    // one SSE metric: a new step, or late values (evaluation) for a step already here
    append(metric) {
      if (!this.data) { (this.pending ??= []).push(() => this.append(metric)); return; }
      const { x, series } = this.data;
      let i = x.length;
      while (i > 0 && x[i - 1] > metric.step) i--;
      const known = i > 0 && x[i - 1] === metric.step;
      if (known) i--; else { x.splice(i, 0, metric.step); Object.values(series).forEach((s) => s.splice(i, 0, null)); }
      for (const [name, value] of Object.entries(metric)) {
        if (name === "step" || typeof value !== "number") continue;
        (series[name] ??= x.map(() => null))[i] = value;
      }
      this.redrawSoon();
    }

    redrawSoon() {
      this.frame ??= requestAnimationFrame(() => {
        this.frame = null;
        this.legend();
        if (!this.plot) return this.draw();
        const x = this.zoomed ? { ...this.plot.scales.x } : null;
        this.plot.setData(this.rows(), false);
        this.range(x);
      });
    }

    // what no metric event says, from the newest answer; if none comes, the next event asks again
    async refresh() {
      if (!this.data) { (this.pending ??= []).push(() => this.refresh()); return; }
      const asked = this.asked = {};
      const found = await this.ask().then((answer) => answer.ok && answer.json()).catch(() => null);
      if (!found || asked !== this.asked) return;
      const { total, epochs, checkpoints, best } = found;
      Object.assign(this.data, { total, epochs, checkpoints, best });
      this.draw();
    }
  }

  const chart = (id) => charts.get(document.getElementById(id));
  const parsed = (e) => (typeof e.detail.data === "string" ? JSON.parse(e.detail.data) : e.detail.data);
  const within = (target) => $$("[data-chart]").filter((el) => target === el || target.contains(el) || el.contains(target));
  const start = () => $$("[data-chart]").forEach((el) => { if (!charts.has(el)) charts.set(el, new Chart(el)); });

  document.addEventListener("metric", (e) => { const m = parsed(e); if (m.step != null) within(e.target).forEach((el) => charts.get(el)?.append(m)); });
  const refresh = (e) => within(e.target).forEach((el) => charts.get(el)?.refresh());
  document.addEventListener("state", refresh);
  document.addEventListener("log", (e) => { if (parsed(e)?.bytes != null) refresh(e); }); // a checkpoint was saved
  // before app.js writes the values: what a template holds for a metric is shown once the metric comes
  document.addEventListener("metric", (e) => { const m = parsed(e); $$("template[data-when]").forEach((n) => { if (m[n.dataset.when] != null) n.replaceWith(n.content); }); }, true);
  document.addEventListener("tabselect", (e) => {
    const c = e.target.dataset.chartFor && chart(e.target.dataset.chartFor);
    if (c) { c.view = c.viewOf(e.target); c.draw(); }
  });
  document.addEventListener("input", (e) => {
    const { chartSmooth, chartLog } = e.target.dataset;
    if (chartSmooth && chart(chartSmooth)) {
      const c = chart(chartSmooth);
      c.smooth = Number(e.target.value);
      $$(`output[for="${e.target.id}"]`).forEach((n) => { n.textContent = c.smooth.toFixed(2); });
      c.redrawSoon();
    }
    if (chartLog && chart(chartLog)) { chart(chartLog).log = e.target.checked; chart(chartLog).draw(); }
  });
  document.addEventListener("click", (e) => {
    const button = e.target.closest("[data-chart-zoom]"), c = button && chart(button.dataset.chartZoom);
    if (c?.plot) button.value === "reset" ? c.range(null) : c.zoom(button.value === "in" ? 0.5 : 2);
  });
  document.addEventListener("dblclick", (e) => { const el = e.target.closest("[data-chart]"), c = el && charts.get(el); if (c?.plot) setTimeout(() => c.range(null)); });
  const repaint = () => $$("[data-chart]").forEach((el) => charts.get(el)?.draw());
  document.addEventListener("themechange", repaint);
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", repaint);
  document.addEventListener("htmx:after:swap", start);
  start();
})();
