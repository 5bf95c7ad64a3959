// The wizard's forms. What is chosen stands in the address, so that reloading, Back and a shared link show the same;
// what was worked out for other values is marked as stale and never shown as current. Delegation only, nothing inline.
(() => {
  const $ = (selector) => document.querySelector(selector);
  // its attributes are read as such: a field called dataset hides the property of that name
  const form = () => $("#wizard[data-step]");
  const names = () => new Set([...form().elements].map((field) => field.name).filter(Boolean));
  const chosen = () => [...new FormData(form())].filter(([, value]) => value.trim() !== "");

  // --- the address ---
  const addressOf = (url) => {
    const address = new URL(url, location.href);
    names().forEach((name) => address.searchParams.delete(name));
    chosen().forEach(([name, value]) => address.searchParams.append(name, value));
    return address;
  };
  let pending = 0;
  const write = () => {
    clearTimeout(pending);
    pending = 0;
    if (!form()) return;
    const address = addressOf(location.href);
    address.searchParams.set("step", form().getAttribute("data-step"));
    if (address.href !== location.href) history.replaceState(history.state, "", address);
  };
  const writeSoon = () => { // browsers limit how often a page may write it
    clearTimeout(pending);
    pending = setTimeout(write, 150);
  };
  // Another step is opened, or the models are searched, with what is on the form now.
  document.addEventListener("click", (e) => {
    const link = e.target.closest?.("[data-carry] a, a[data-carry]");
    if (!link || !form()) return;
    write();
    link.href = addressOf(link.href).href;
  }, true);
  document.addEventListener("submit", (e) => {
    if (!form()) return;
    write();
    if (!e.target.matches("form[data-carry]")) return;
    e.target.querySelectorAll("[data-carried]").forEach((field) => field.remove());
    chosen().filter(([name]) => !e.target.elements.namedItem(name)).forEach(([name, value]) => {
      const field = Object.assign(document.createElement("input"), { type: "hidden", name, value });
      field.dataset.carried = "";
      e.target.append(field);
    });
  }, true);

  // A step begins at its heading, for the keyboard and for screen readers; an error summary comes first.
  const heading = $("main h1");
  if (heading && document.activeElement === document.body) {
    heading.tabIndex = -1;
    heading.focus({ preventScroll: true });
  }

  // --- stale: from the first change until the answer to the last one; failed: no answer came ---
  let edits = 0, asker = null;
  const words = $("[data-words=wizard]").dataset;
  const mark = (state, text = "") => {
    if (!form()) return;
    form().setAttribute("data-state", state);
    form().setAttribute("aria-busy", state === "stale");
    const notice = $("[data-live-failed]");
    if (!notice) return;
    notice.hidden = state !== "failed";
    if (text) notice.querySelector("[data-live-reason]").textContent = text;
  };
  // An error is about a value that was sent. It goes with that value; all go with an answer that refuses none.
  const forgive = (part) => {
    part.querySelectorAll(".error, .summary-errors").forEach((n) => n.remove());
    part.querySelectorAll("[aria-invalid]").forEach((n) => n.removeAttribute("aria-invalid"));
  };
  const isOurs = (ctx) => Boolean(ctx?.sourceElement?.closest?.("#wizard"));
  const fail = (ctx) => {
    if (ctx.edits !== edits) return; // a newer request is on its way
    asker = ctx.sourceElement;
    mark("failed", navigator.onLine ? words.failed : words.offline);
  };
  const retry = () => asker?.dispatchEvent(new Event("input", { bubbles: true }));
  document.addEventListener("input", (e) => {
    if (!form()?.contains(e.target) && e.target.form !== form()) return;
    writeSoon();
    if (!e.target.closest("[hx-get]")) return;
    forgive(e.target.closest(".field, .tick") ?? e.target);
    edits += 1;
    mark("stale");
  }, true); // before htmx asks: each request knows the edits it is for
  document.addEventListener("htmx:before:request", (e) => {
    if (isOurs(e.detail.ctx)) e.detail.ctx.edits = edits;
  });
  document.addEventListener("htmx:before:response", (e) => {
    const { ctx } = e.detail;
    if (!isOurs(ctx)) return;
    const isAnswer = [200, 422].includes(ctx.response.status) && !ctx.response.raw.redirected; // 422: a value is refused
    if (ctx.edits === edits && isAnswer) return;
    if (ctx.response.raw.headers.get("HX-Redirect")) return; // signed out meanwhile
    e.preventDefault();
    fail(ctx);
  });
  document.addEventListener("htmx:error", (e) => { if (isOurs(e.detail.ctx)) fail(e.detail.ctx); });
  document.addEventListener("htmx:finally:request", (e) => {
    const { ctx } = e.detail;
    if (!isOurs(ctx) || ctx.edits !== edits || ctx.status !== "swapped") return;
    mark("");
    $("[data-problem]")?.remove(); // the answer shows the present one
    if (ctx.response.status === 200) forgive(form());
    write(); // the answer chose values that depend on the changed one
  });
  document.addEventListener("click", (e) => { if (e.target.closest?.("[data-live-retry]")) retry(); });
  addEventListener("online", () => { if (form()?.getAttribute("data-state") === "failed") retry(); });
})();
