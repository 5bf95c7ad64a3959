// Forms whose values stand in the address, so that reloading, Back and a shared link show the same. Delegation only.
// A step of the wizard (data-step) keeps what else its address holds. Any other form writes each field that people see,
// even if empty: what the address lacks has its default. The longest texts are left out if they do not fit, and a
// sentence below their fields says so.
(() => {
  // Front servers take addresses of 8 KB, also of the login page, which holds this one with each % as %25.
  const MOST = 4500;
  // its attributes are read as such: a field called dataset hides the property of that name
  const form = () => document.querySelector("form[data-address]");
  const step = () => form().getAttribute("data-step");
  const names = () => new Set([...form().elements].map((field) => field.name).filter(Boolean));
  const chosen = () => [...new FormData(form())].filter(([, value]) => value.trim() !== "");
  const seen = () => [...form().elements].filter(({ name, type }) => name && type !== "hidden" && type !== "submit");
  const shape = () => String(seen().map(({ name }) => name));

  const leftOut = new Set();
  const tell = () => seen().forEach((field) => {
    const id = `${field.id}_left_out`, note = document.getElementById(id);
    if (!leftOut.has(field)) return note?.remove();
    const text = document.querySelector("[data-words=address]").dataset.long;
    if (!note) field.closest(".field")?.append(Object.assign(document.createElement("p"), { id, className: "help warn", role: "status", textContent: text }));
  });

  const addressOf = (url) => {
    const address = new URL(url, location.href), { searchParams } = address;
    names().forEach((name) => searchParams.delete(name));
    if (step()) chosen().forEach(([name, value]) => searchParams.append(name, value));
    else {
      leftOut.clear();
      seen().sort((a, b) => a.value.length - b.value.length).forEach((field) => { // long texts last
        searchParams.append(field.name, field.value);
        if (address.href.length > MOST) {
          searchParams.delete(field.name);
          if (field.value !== field.defaultValue) leftOut.add(field); // else it comes back with the page
        }
      });
      tell();
    }
    return address;
  };
  let pending = 0, written = form() && shape();
  const write = () => {
    clearTimeout(pending);
    pending = 0;
    if (!form()) return;
    const address = addressOf(form().getAttribute("data-address") || location.href);
    if (step()) address.searchParams.set("step", step());
    written = shape();
    if (address.href !== location.href) history.replaceState(history.state, "", address);
  };
  document.addEventListener("input", (e) => {
    if (!form()?.contains(e.target) && (!e.target.form || e.target.form !== form())) return;
    clearTimeout(pending);
    pending = setTimeout(write, 150); // browsers limit how often a page may write it
  }, true);
  document.addEventListener("htmx:finally:request", (e) => {
    const { ctx } = e.detail;
    if (!form() || ctx.status !== "swapped") return;
    // the answer to a step chose values that depend on the changed one; that of another form brought or took fields
    if (step() ? form().contains(ctx.sourceElement) : shape() !== written) write();
  });

  // Another step is opened, or the models are searched, with what is on the form now.
  document.addEventListener("click", (e) => {
    if (pending) write();
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
})();
