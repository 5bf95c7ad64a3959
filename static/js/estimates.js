// Forms that show what their values cost. What was worked out for other values is marked as stale and never shown as
// current. Delegation only, nothing inline; address.js keeps what is chosen in the address.
(() => {
  const $ = (selector) => document.querySelector(selector);
  // its attributes are read as such: a field called dataset hides the property of that name
  const form = () => $("form[data-address]");

  // --- stale: from the first change until the answer to the last one; failed: no answer came ---
  let edits = 0, lost = null;
  const words = $("[data-words=estimates]").dataset;
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
  const isOurs = (ctx) => Boolean(ctx?.sourceElement?.closest?.("form[data-address]"));
  const isOfCriteria = (ctx) => ctx.target?.id === "criteria"; // they ask for the price once they are there
  const fail = (ctx) => {
    if (ctx.edits !== edits) return; // a newer request is on its way
    lost = ctx;
    mark("failed", navigator.onLine ? words.failed : words.offline);
  };
  const retry = () => {
    const asker = lost?.sourceElement;
    if (asker?.matches("button")) asker.click();
    else asker?.dispatchEvent(new Event(isOfCriteria(lost) ? "change" : "input", { bubbles: true }));
  };
  document.addEventListener("input", (e) => {
    if (!form()?.contains(e.target) && e.target.form !== form()) return;
    if (!e.target.closest("[hx-get], form[data-address]:not([data-step])")) return;
    forgive(e.target.closest(".field, .tick") ?? e.target);
    edits += 1;
    mark("stale");
  }, true); // before htmx asks: each request knows the edits it is for
  document.addEventListener("htmx:before:request", (e) => {
    const { ctx } = e.detail;
    if (!isOurs(ctx)) return;
    if (isOfCriteria(ctx)) { // their number changes
      edits += 1;
      mark("stale");
    }
    ctx.edits = edits;
  });
  document.addEventListener("htmx:before:response", (e) => {
    const { ctx } = e.detail;
    if (!isOurs(ctx)) return;
    const isAnswer = [200, 422].includes(ctx.response.status) && !ctx.response.raw.redirected; // 422: a value is refused
    if ((ctx.edits === edits || isOfCriteria(ctx)) && isAnswer) return;
    if (ctx.response.raw.headers.get("HX-Redirect")) return; // signed out meanwhile
    e.preventDefault();
    fail(ctx);
  });
  document.addEventListener("htmx:error", (e) => { if (isOurs(e.detail.ctx)) fail(e.detail.ctx); });
  document.addEventListener("htmx:finally:request", (e) => {
    const { ctx } = e.detail;
    if (!isOurs(ctx) || ctx.edits !== edits || ctx.status !== "swapped" || isOfCriteria(ctx)) return;
    mark("");
    $("[data-problem]")?.remove(); // the answer shows the present one
    if (ctx.response.status === 200) forgive(form());
  });
  document.addEventListener("click", (e) => { if (e.target.closest?.("[data-live-retry]")) retry(); });
  addEventListener("online", () => { if (form()?.getAttribute("data-state") === "failed") retry(); });
})();
