// Behaviour of the shell. Event delegation only, so htmx swaps need no re-init; no eval, nothing inline.
(() => {
  const $ = (selector, root = document) => root.querySelector(selector);
  const $$ = (selector, root = document) => [...root.querySelectorAll(selector)];
  const root = document.documentElement, words = $("[data-words=shell]").dataset;

  // --- toasts: rendered by Django, sent by htmx (HX-Trigger: {"toast": {"text", "tone"}}), or made here ---
  const zone = () => $("[data-toasts]");
  const retire = (toast) => {
    if (toast.dataset.timed || toast.dataset.toast === "error") return; // errors stay until read
    toast.dataset.timed = "1";
    setTimeout(() => toast.remove(), 6000);
  };
  const toast = (text, tone = "") => {
    const box = document.createElement("div"), line = document.createElement("span");
    box.className = tone === "error" ? "toast toast-bad" : "toast";
    box.dataset.toast = tone;
    line.textContent = text;
    box.append(line);
    zone()?.append(box);
    while (zone()?.children.length > 4) zone().firstElementChild.remove();
    setTimeout(() => box.remove(), tone === "error" ? 12000 : 4000);
  };
  document.addEventListener("toast", (e) => toast(e.detail.text ?? e.detail.value ?? "", e.detail.tone));

  const copy = (text, done) => navigator.clipboard?.writeText(text).then(() => toast(done), () => toast(words.uncopied, "error"));

  // --- theme: the cookie is what Django renders next time; without script the form posts and the page comes back ---
  document.addEventListener("submit", (e) => {
    if (!e.target.matches("[data-theme-form]")) return;
    e.preventDefault();
    const dark = (root.dataset.theme || (matchMedia("(prefers-color-scheme: dark)").matches ? "dark" : "light")) === "dark";
    root.dataset.theme = dark ? "light" : "dark";
    document.cookie = `theme=${root.dataset.theme}; path=/; max-age=31536000; samesite=lax${location.protocol === "https:" ? "; secure" : ""}`;
    document.dispatchEvent(new CustomEvent("themechange"));
  });

  // --- a page outlives a sign-in in another tab: its forms send the token of that sign-in, which the cookie has ---
  const token = () => (document.cookie.match(/(?:^|; )__Host-csrf=(\w+)/) ?? document.cookie.match(/(?:^|; )csrftoken=(\w+)/))?.[1];
  document.addEventListener("submit", (e) => {
    const field = e.target.elements.csrfmiddlewaretoken;
    if (field && token()) field.value = token();
  }, true);
  document.addEventListener("htmx:config:request", (e) => {
    const { body, headers } = e.detail.ctx.request;
    if (!token() || !headers["X-CSRFToken"]) return;
    headers["X-CSRFToken"] = token();
    if (body?.has?.("csrfmiddlewaretoken")) body.set("csrfmiddlewaretoken", token());
  });

  // --- polls: the server is told; what is pressed (a replaced button gets no click) or open stays ---
  document.addEventListener("htmx:config:request", ({ detail: { ctx } }) => {
    if (!/^(click|submit|input|change)$/.test(ctx.sourceEvent?.type)) ctx.request.headers["X-Poll"] = "1";
  });
  let opened = [];
  document.addEventListener("htmx:before:swap", (e) => {
    opened = $$("details[id][open]").map((n) => n.id);
    if (!e.target.matches("[hx-trigger*=every]")) return;
    if ($("main :is(:active, dialog[open], :popover-open)")) e.preventDefault();
  });
  document.addEventListener("htmx:after:swap", () => opened.forEach((id) => document.getElementById(id)?.setAttribute("open", "")));
  document.addEventListener("htmx:before:request", (e) => { if (document.hidden && e.target.matches("[hx-trigger*=visibilitychange]")) e.preventDefault(); });

  // --- clicks ---
  let pressed;
  document.addEventListener("pointerdown", (e) => { pressed = e.target; });
  document.addEventListener("pointerup", (e) => { if (e.target !== pressed) pressed = null; });
  document.addEventListener("click", (e) => {
    const hit = (selector) => e.target.closest(selector);
    let el;
    if ((el = hit("[data-open]"))) openDialog(el.dataset.open, el);
    else if (hit("[data-close]")) hit("dialog")?.close();
    else if (e.target.matches("dialog") && e.target === pressed) e.target.close(); // pressed and left on the backdrop
    else if ((el = hit("[data-dismiss]"))) el.closest("[data-toast], [data-dismissable]").remove();
    else if ((el = hit("[data-copy]"))) copy(el.dataset.copy || $("code", el.closest(".code")).textContent, el.dataset.copied || words.copied);
    else if ((el = hit("[role=tab][aria-controls]"))) selectTab(el);
    else if ((el = hit("#palette [role=option]"))) location.assign(el.dataset.href);
    else if ((el = hit("tr[data-pick]")) && !hit("a, button, input, label, select")) pick(el);
    else if ((el = hit("[data-menu] button[data-open], [data-menu] a"))) el.closest("[popover]")?.hidePopover();
  });
  const pick = (row) => {
    const radio = $("input[type=radio]", row);
    if (!radio || radio.disabled || radio.checked) return;
    radio.checked = true;
    for (const name of ["input", "change"]) radio.dispatchEvent(new Event(name, { bubbles: true }));
  };
  const openDialog = (id, from) => {
    const dialog = document.getElementById(id);
    if (!dialog || dialog.open) return;
    from?.closest("[popover]")?.hidePopover();
    dialog.showModal();
    if (id === "palette") resetPalette();
  };

  // --- changes: a chosen row fills the price panel; filters submit themselves; typed confirmation ---
  document.addEventListener("change", (e) => {
    const row = e.target.type === "radio" && e.target.closest("tr[data-pick]");
    if (row) $$("[data-out]").forEach((n) => { if (row.dataset[n.dataset.out] !== undefined) n.textContent = row.dataset[n.dataset.out]; });
    if (e.target.matches("[data-submit]")) e.target.form.requestSubmit();
    if (e.target.matches("[data-pick-all]")) $$("input.pick", e.target.closest("table, fieldset")).forEach((n) => { n.checked = e.target.checked; });
    if (e.target.matches("[data-single-keys]")) localStorage.setItem("single-keys", e.target.checked ? "on" : "off");
  });
  document.addEventListener("input", (e) => {
    if (!e.target.matches("[data-typed]")) return;
    $("[data-typed-submit]", e.target.form).disabled = e.target.value.trim() !== e.target.dataset.typed;
  });
  document.addEventListener("submit", (e) => {
    if (e.defaultPrevented || e.target.matches("[method=dialog]") || [...e.target.attributes].some((a) => a.name.startsWith("hx-"))) return;
    e.submitter?.setAttribute("aria-busy", "true");
  });
  addEventListener("pageshow", () => $$("[aria-busy=true].btn").forEach((n) => n.removeAttribute("aria-busy")));

  // --- tabs: roving focus; aria-controls says which panel ---
  const selectTab = (tab) => {
    $$("[role=tab]", tab.closest("[role=tablist]")).forEach((other) => {
      const on = other === tab, panel = document.getElementById(other.getAttribute("aria-controls"));
      other.setAttribute("aria-selected", on);
      other.tabIndex = on ? 0 : -1;
      if (panel?.getAttribute("role") === "tabpanel") panel.hidden = !on;
    });
    tab.dispatchEvent(new CustomEvent("tabselect", { bubbles: true }));
  };
  const turnTabs = (e, tab) => {
    const all = $$("[role=tab]", tab.closest("[role=tablist]")), now = all.indexOf(tab);
    const next = { ArrowLeft: now - 1, ArrowRight: now + 1, Home: 0, End: all.length - 1 }[e.key];
    if (next === undefined) return;
    e.preventDefault();
    const to = all[(next + all.length) % all.length];
    to.focus();
    selectTab(to);
  };

  // --- command palette: combobox over a listbox; it lists pages, and the server finds objects ---
  const field = () => $("#palette input");
  const shown = () => $$("#palette [role=option]").filter((n) => !n.hidden);
  const isSearch = (ctx) => Boolean(ctx?.sourceElement?.closest?.("#palette"));
  const sayNone = (text) => { $("[data-palette-none]").textContent = text; };
  const activate = (index) => {
    const list = shown();
    $$("#palette [role=option]").forEach((n) => n.setAttribute("aria-selected", "false"));
    $("[data-palette-none]").hidden = list.length > 0;
    if (!list.length) return field().removeAttribute("aria-activedescendant");
    const at = list[(index + list.length) % list.length];
    at.setAttribute("aria-selected", "true");
    field().setAttribute("aria-activedescendant", at.id);
    at.scrollIntoView({ block: "nearest" });
  };
  const filterPalette = () => {
    const typed = field().value.toLowerCase().split(/\s+/).filter(Boolean);
    $$("#palette [data-found]").forEach((n) => n.replaceChildren()); // they were for other words
    sayNone(field().value.trim().length < 2 ? words.none : words.searching);
    $$("#palette [role=option]").forEach((n) => {
      const text = (n.textContent + " " + (n.closest("[role=group]")?.getAttribute("aria-label") ?? "")).toLowerCase();
      n.hidden = !typed.every((word) => text.includes(word));
    });
    activate(0);
  };
  const resetPalette = () => { field().value = ""; filterPalette(); field().focus(); };
  const turnPalette = (e) => {
    const list = shown(), now = list.findIndex((n) => n.getAttribute("aria-selected") === "true");
    if (e.key === "ArrowDown" || e.key === "ArrowUp") { e.preventDefault(); activate(now + (e.key === "ArrowDown" ? 1 : -1)); }
    else if (e.key === "Enter") { e.preventDefault(); list[now]?.click(); }
  };
  document.addEventListener("input", (e) => { if (e.target === field()) filterPalette(); });
  document.addEventListener("htmx:before:response", (e) => {
    const { ctx } = e.detail;
    if (isSearch(ctx) && new URL(ctx.request.action, location.href).searchParams.get("q") !== field().value) e.preventDefault();
  });
  document.addEventListener("htmx:after:swap", (e) => {
    if (!isSearch(e.detail.ctx)) return;
    sayNone(words.none);
    activate(Math.max(0, shown().findIndex((n) => n.getAttribute("aria-selected") === "true")));
  });

  // --- answers that do not come: what is shown stays, and the page says that it is not current ---
  const missing = new Set(); // elements without an answer
  const lose = (text) => $$("[data-lost]").forEach((n) => { n.hidden = !text; $("span", n).textContent = text; });
  const miss = (ctx) => {
    if (isSearch(ctx)) return sayNone(words.unanswered);
    if (ctx?.sourceElement?.closest?.("form[data-address]")) return; // such a form says it itself
    if (ctx?.sourceElement) missing.add(ctx.sourceElement);
    lose(navigator.onLine ? words.stale : words.offline);
  };
  const recover = () => {
    for (const each of missing) if (!each.isConnected) missing.delete(each); // what it updated is gone
    if (navigator.onLine) lose(missing.size ? words.stale : "");
  };
  document.addEventListener("htmx:before:response", (e) => {
    const { ctx } = e.detail, { status, raw } = ctx.response;
    const isAnswer = (status < 400 || status === 422) && !raw.redirected; // 422: a form with its errors
    if (isAnswer || ctx.sourceElement.hasAttribute("hx-sse:connect")) return;
    e.preventDefault();
    miss(ctx);
  });
  document.addEventListener("htmx:error", (e) => miss(e.detail.ctx));
  document.addEventListener("htmx:after:swap", (e) => {
    missing.delete(e.detail.ctx.sourceElement);
    recover();
  });
  addEventListener("offline", () => lose(words.offline));
  addEventListener("online", () => {
    recover();
    for (const each of missing) if (each.hasAttribute("hx-get")) htmx.ajax("GET", each.getAttribute("hx-get"), { source: each });
  });

  // --- keys. Single letters never act in a field and can be switched off (WCAG 2.1.4) ---
  let went = 0;
  const singleKeys = () => localStorage.getItem("single-keys") !== "off";
  document.addEventListener("keydown", (e) => {
    const command = e.metaKey || e.ctrlKey, el = e.target;
    if (command && e.key.toLowerCase() === "k" && $("#palette")) {
      e.preventDefault();
      return $("#palette").open ? $("#palette").close() : openDialog("palette");
    }
    if (command && e.key === "Enter") return submitFrom(el);
    if (el === field()) return turnPalette(e);
    if (el.matches?.("[role=tab]")) return turnTabs(e, el);
    if (el.closest?.("[data-menu]") && ["ArrowDown", "ArrowUp"].includes(e.key)) return turnMenu(e);
    if (command || e.altKey || !singleKeys() || el.closest?.("input:not(.pick), textarea, select, [contenteditable], dialog[open]")) return;
    pressKey(e);
  });
  // as Enter in a field: not while the form's button is disabled; outside of forms, the page's one main button
  const submitFrom = (el) => {
    const main = $$("main .btn-primary[type=submit]");
    const form = el.closest?.("form") ?? (main.length === 1 ? main[0].form : null), button = form && [...form.elements].find((n) => n.type === "submit");
    if (!button?.disabled) form?.requestSubmit();
  };
  const pressKey = (e) => {
    const key = e.key.toLowerCase(), go = Date.now() - went < 1200;
    went = 0;
    const link = go ? $(`[data-go="${CSS.escape(key)}"]`) : $(`[data-key="${CSS.escape(key)}"]`);
    if (go && link) location.assign(link.href);
    else if (key === "g") went = Date.now();
    else if (key === "?") openDialog("shortcuts");
    else if (key === "/") { e.preventDefault(); $("[data-filter]") ? $("[data-filter]").focus() : openDialog("palette"); }
    else if ((key === "j" || key === "k") && listed().length) { e.preventDefault(); stepRow(key === "j" ? 1 : -1); }
    else if (link) link.dataset.href ? location.assign(link.dataset.href) : link.click();
  };
  const listed = () => ($("[data-rows]") ? $$("[data-rows] a") : $$("main tbody tr").flatMap((n) => $("a.name", n) ?? $("input.pick, .acts button", n) ?? []));
  const stepRow = (by) => {
    const rows = listed();
    const now = rows.findIndex((n) => n === document.activeElement);
    const from = now >= 0 ? now : rows.findIndex((n) => n.hasAttribute("aria-current"));
    const to = rows[Math.min(rows.length - 1, Math.max(0, from + by))];
    to?.focus();
    if (to?.closest("[data-rows=open]")) to.click();
  };
  const turnMenu = (e) => {
    const items = $$("a, button:not(:disabled)", e.target.closest("[data-menu]"));
    e.preventDefault();
    items[(items.indexOf(document.activeElement) + (e.key === "ArrowDown" ? 1 : -1) + items.length) % items.length]?.focus();
  };

  // --- menus: anchored by CSS where that exists, placed here elsewhere ---
  document.addEventListener("toggle", (e) => {
    const menu = e.target;
    if (e.newState !== "open" || !menu.matches("[data-menu]") || CSS.supports("position-area", "bottom")) return;
    const from = $(`[popovertarget="${CSS.escape(menu.id)}"]`).getBoundingClientRect();
    const left = Math.min(from.left, innerWidth - menu.offsetWidth - 8);
    const below = from.bottom + 4 + menu.offsetHeight < innerHeight;
    menu.style.left = `${Math.max(8, left)}px`;
    menu.style.top = `${below ? from.bottom + 4 : Math.max(8, from.top - 4 - menu.offsetHeight)}px`;
  }, true);

  // --- once for new content: local times, focus on an error summary, toasts that expire ---
  const STYLES = { date: { dateStyle: "medium" }, time: { timeStyle: "short" }, datetime: { dateStyle: "medium", timeStyle: "short" } };
  const localise = () => $$("time[data-time]:not([data-local])").forEach((n) => {
    n.dataset.local = "1";
    const options = STYLES[n.dataset.time];
    if (options) n.textContent = new Intl.DateTimeFormat(root.lang + "-GB", options).format(new Date(n.dateTime));
  });
  // A moment is typed in the reader's zone and sent in UTC; without script, as UTC.
  const inZone = (utc) => { const at = new Date(utc); return new Date(at - at.getTimezoneOffset() * 60000).toISOString().slice(0, 16); };
  const moments = () => $$("input[data-utc][name]").forEach((n) => {
    const sent = Object.assign(document.createElement("input"), { type: "hidden", name: n.name, value: n.value && `${n.value}Z` });
    n.removeAttribute("name");
    if (n.value) n.value = inZone(sent.value);
    n.after(sent);
    $$("[data-utc-zone]", n.parentElement).forEach((zone) => { zone.hidden = true; });
  });
  document.addEventListener("input", (e) => {
    if (e.target.matches("[data-utc]")) e.target.nextElementSibling.value = e.target.value && `${new Date(e.target.value).toISOString().slice(0, 16)}Z`;
  }, true);
  const fresh = () => {
    localise();
    moments();
    $$("[data-toast]").forEach(retire);
    $$("[data-typed-submit]").forEach((n) => { if (!$("[data-typed]", n.form).value) n.disabled = true; });
    $$("dialog[data-autoopen]:not([open])").forEach((n) => { n.removeAttribute("data-autoopen"); n.showModal(); });
    $("[data-focus]:not([data-focused])")?.focus();
    $$("[data-focus]").forEach((n) => { n.dataset.focused = "1"; });
    $$("[data-single-keys]").forEach((n) => { n.checked = singleKeys(); });
    $$("[data-pick-all]").forEach((n) => { n.hidden = false; });
  };
  // the command key, as this keyboard names it
  if (/mac|iphone|ipad/i.test(navigator.userAgentData?.platform ?? navigator.platform)) $$("[data-command]").forEach((n) => { n.textContent = "⌘"; });
  document.addEventListener("htmx:after:swap", fresh);
  fresh();
})();
