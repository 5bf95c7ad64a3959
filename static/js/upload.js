// A form with data-upload sends its file with progress, a large one in parts (upload-parts.js); without this script the
// same form posts as any other.
(() => {
  const $ = (selector, root) => root.querySelector(selector);
  const words = $("[data-words=upload]", document).dataset;
  const size = (n) => (n < 1e6 ? `${Math.max(1, Math.round(n / 1e3))} KB` : n < 1e9 ? `${(n / 1e6).toFixed(1)} MB` : `${(n / 1e9).toFixed(2)} GB`);
  const span = (s) => words.left.replace("{time}", s < 60 ? `${Math.ceil(s)} s` : s < 3600 ? `${Math.ceil(s / 60)} min` : `${(s / 3600).toFixed(1)} h`);

  const named = (form) => {
    const file = $("input[type=file]", form).files[0], title = $("[data-drop-title]", form);
    if (file && title) title.textContent = `${file.name}, ${size(file.size)}`;
    const name = $("[data-upload-fill]", form);
    if (file && name && !name.value) name.value = file.name.replace(/\.[^.]+$/, "");
  };
  document.addEventListener("change", (e) => { const form = e.target.closest("form[data-upload]"); if (form && e.target.type === "file") named(form); });

  // the file input lies over the zone, so the browser itself takes the drop; these only show that it will
  for (const type of ["dragenter", "dragover"]) document.addEventListener(type, (e) => { const zone = e.target.closest?.("[data-drop]"); if (zone) zone.dataset.over = "1"; });
  for (const type of ["dragleave", "drop"]) document.addEventListener(type, (e) => { const zone = e.target.closest?.("[data-drop]"); if (zone) delete zone.dataset.over; });

  const fail = (form, text) => {
    const error = $("[data-upload-error]", form);
    idle(form);
    error.textContent = text;
    error.hidden = false;
  };
  const idle = (form) => {
    $("[data-upload-row]", form).hidden = $("[data-upload-pause]", form).hidden = true;
    $("[data-drop]", form).hidden = false;
    form.querySelectorAll("[type=submit]").forEach((n) => { n.disabled = false; n.removeAttribute("aria-busy"); });
  };

  const failed = (status) => words.failed.replace("{status}", status);

  const show = (form, started, e) => {
    const done = Math.round((100 * e.loaded) / e.total), seconds = (performance.now() - started) / 1000, speed = (e.loaded - (e.before ?? 0)) / Math.max(seconds, 0.1);
    const meter = $("[data-upload-row] svg", form);
    meter.setAttribute("aria-valuenow", done);
    $("rect", meter).setAttribute("width", done);
    $("[data-upload-note]", form).textContent = e.loaded < e.total ? words.sent.replace("{sent}", size(e.loaded)).replace("{size}", size(e.total)).replace("{speed}", `${size(speed)}/s`) : words.processing;
    $("[data-upload-left]", form).textContent = e.loaded < e.total && seconds > 1 && speed > 0 ? span((e.total - e.loaded) / speed) : "";
  };

  // a redirect has been followed by the browser; a form with errors comes back as a page whose form replaces ours
  const finish = (form, xhr) => {
    const type = xhr.getResponseHeader("Content-Type") ?? "", to = xhr.getResponseHeader("HX-Redirect");
    if (to) return location.assign(to);
    if (xhr.status < 300) return location.assign(xhr.responseURL);
    if (type.includes("json")) {
      let message;
      try { message = JSON.parse(xhr.responseText).error?.message; } catch { /* answered below */ }
      return fail(form, message ?? failed(xhr.status));
    }
    const fresh = form.id && new DOMParser().parseFromString(xhr.responseText, "text/html").getElementById(form.id);
    if (!fresh) return fail(form, failed(xhr.status));
    form.replaceWith(fresh);
    window.htmx?.process(fresh);
    fresh.querySelector("[data-focus], [aria-invalid=true]")?.focus();
  };

  const post = (form) => {
    const xhr = new XMLHttpRequest(), started = performance.now();
    xhr.upload.onprogress = (event) => show(form, started, event);
    xhr.onload = () => finish(form, xhr);
    xhr.onerror = () => fail(form, words.disconnected);
    xhr.onabort = () => idle(form);
    $("[data-upload-cancel]", form).onclick = () => xhr.abort();
    xhr.open("POST", form.action);
    xhr.setRequestHeader("Accept", "application/json, text/html");
    xhr.send(new FormData(form));
  };

  document.addEventListener("submit", (e) => {
    const form = e.target.closest("form[data-upload]");
    if (!form || e.defaultPrevented) return;
    e.preventDefault();
    if (!$("[data-upload-row]", form).hidden) return; // a disabled button does not stop Ctrl+Enter
    const file = $("input[type=file]", form).files[0];
    $("[data-upload-error]", form).hidden = $("[data-upload-resume]", form).hidden = true;
    $("[data-upload-name]", form).textContent = file?.name ?? "";
    $("[data-drop]", form).hidden = true;
    $("[data-upload-row]", form).hidden = false;
    form.querySelectorAll("[type=submit]").forEach((n) => { n.disabled = true; });
    const inParts = form.dataset.uploadParts && file && file.size > Number(form.dataset.uploadPartsFrom);
    if (inParts) window.sendInParts(form, file, { show, fail, idle, size, words }); else post(form);
  });
})();
