// Large files go in parts, three at a time, straight to the store. What has arrived is asked of the server, so a reload,
// a lost connection or a restarted server costs only the parts that were under way.
(() => {
  const LANES = 3, SIGNED_AT_ONCE = 12, TRIES = 40, LONGEST_WAIT = 15000;
  const remembered = (file) => `upload:${file.name}:${file.size}:${file.lastModified}`;
  const pause = (tries) => new Promise((done) => { setTimeout(done, Math.min(LONGEST_WAIT, 500 * 2 ** Math.min(tries, 6))); });

  class Refused extends Error {}
  class Stopped extends Error {}

  // answers JSON; tries again while the server is away, and gives up at once on what it refuses
  const ask = async (run, url, body) => {
    for (let tries = 0; ; tries += 1) {
      if (run.stopped) throw new Stopped();
      try {
        const options = body === undefined ? {} : { method: "POST", body: JSON.stringify(body) };
        const headers = { ...run.headers, "Content-Type": "application/json", Accept: "application/json" };
        const response = await fetch(url, { ...options, headers, signal: run.abort.signal });
        const type = response.headers.get("Content-Type") ?? "";
        if (response.ok && type.includes("json")) return await response.json();
        if (response.status < 500 && response.status !== 429) throw new Refused(type.includes("json") ? (await response.json()).error?.message : run.words.failed.replace("{status}", response.status));
      } catch (error) {
        if (error instanceof Refused || run.stopped) throw error;
      }
      if (tries >= TRIES) throw new Refused(run.words.unreachable);
      run.say(run.words.waiting);
      await pause(tries);
    }
  };

  const put = (run, url, blob, number) => new Promise((done) => {
    const xhr = new XMLHttpRequest();
    run.requests.add(xhr);
    xhr.upload.onprogress = (e) => { run.flying.set(number, e.loaded); run.draw(); };
    xhr.onloadend = () => { run.requests.delete(xhr); run.flying.delete(number); done(xhr.status); };
    xhr.open("PUT", url);
    xhr.send(blob);
  });

  const sendPart = async (run, number) => {
    const start = (number - 1) * run.plan.part_bytes, blob = run.file.slice(start, start + run.plan.part_bytes);
    for (let tries = 0; tries < TRIES; tries += 1) {
      await run.going;
      if (!run.urls.has(number)) await sign(run, number);
      await run.going; // it may have been paused meanwhile
      if (run.stopped) throw new Stopped();
      const status = await put(run, run.urls.get(number), blob, number);
      if (status >= 200 && status < 300) { run.sent += blob.size; run.draw(); return; }
      if (run.resume) { tries = -1; continue; } // it was paused, which is no fault
      run.urls.delete(number); // expired, or the server it was for is gone
      if (!run.stopped) { run.say(run.words.waiting); await pause(tries); }
    }
    throw new Refused(run.words.unstored);
  };

  const sign = async (run, number) => {
    const wanted = [number, ...run.queue.slice(0, SIGNED_AT_ONCE - 1)];
    const { urls } = await ask(run, `${run.base}/${run.plan.id}/sign`, { numbers: wanted });
    for (const [key, url] of Object.entries(urls)) run.urls.set(Number(key), url);
  };

  const lane = async (run) => {
    while (run.queue.length) await sendPart(run, run.queue.shift());
  };

  // the plan of an upload that was begun and not finished, else of a new one
  const plan = async (run, form) => {
    const known = localStorage.getItem(remembered(run.file));
    const project = form.querySelector("select[name=project]")?.value ?? "";
    const name = form.querySelector("input[name=name]")?.value.trim() ?? "";
    if (known) {
      try {
        const found = await ask(run, `${run.base}/${known}`);
        const isHere = !project || found.project === project; // others see what is in another project
        const isNamed = !name || found.name === name; // another name asks for another dataset
        if (found.status === "pending" && found.bytes === run.file.size && isHere && isNamed) return found;
      } catch (error) { if (!(error instanceof Refused)) throw error; }
    }
    const made = await ask(run, run.base, { filename: run.file.name, bytes: run.file.size, name, project });
    localStorage.setItem(remembered(run.file), made.id);
    return made;
  };

  const send = async (run, form) => {
    run.plan = await plan(run, form);
    const present = new Set(run.plan.present), last = run.plan.bytes - (run.plan.parts - 1) * run.plan.part_bytes;
    for (let number = 1; number <= run.plan.parts; number += 1) {
      if (!present.has(number)) run.queue.push(number);
      else run.sent += number === run.plan.parts ? last : run.plan.part_bytes;
    }
    run.before = run.sent;
    run.draw();
    const button = form.querySelector("[data-upload-pause]");
    button.onclick = () => (run.resume ? run.resume() : run.pause());
    button.hidden = false;
    await Promise.all(Array.from({ length: LANES }, () => lane(run)));
    await run.going;
    button.hidden = true;
    run.say(run.words.processing);
    const { url } = await ask(run, `${run.base}/${run.plan.id}/complete`, {});
    localStorage.removeItem(remembered(run.file));
    location.assign(url);
  };

  // an upload that stopped is told of where it can go on; the browser gives a file only to who chooses it again
  const recall = async (form) => {
    const note = form.querySelector("[data-upload-resume]");
    for (const key of Object.keys(localStorage).filter((each) => each.startsWith("upload:"))) {
      const response = await fetch(`${form.dataset.uploadParts}/${localStorage.getItem(key)}`).catch(() => null);
      if (!response?.ok) continue; // of another organization, perhaps
      const found = await response.json();
      if (found.status !== "pending") { localStorage.removeItem(key); continue; }
      const name = key.split(":").slice(1, -2).join(":"), percent = Math.floor((100 * found.present.length) / found.parts);
      note.textContent = document.querySelector("[data-words=upload]").dataset.stopped.replace("{percent}", percent).replace("{name}", () => name);
      if (!form.querySelector("[data-upload-row]").hidden) return; // it goes on already
      note.hidden = false;
    }
  };
  document.addEventListener("DOMContentLoaded", () => { document.querySelectorAll("form[data-upload-parts]").forEach(recall); });

  window.sendInParts = (form, file, { show, fail, idle, size, words }) => {
    const label = (text) => { form.querySelector("[data-upload-pause]").textContent = text; };
    const run = {
      words, started: performance.now(), going: null, resume: null,
      file, base: form.dataset.uploadParts, headers: { "X-CSRFToken": form.elements.csrfmiddlewaretoken.value, "X-Selection": form.elements.selection.value },
      plan: null, queue: [], urls: new Map(), flying: new Map(), requests: new Set(), sent: 0, before: 0, stopped: false, abort: new AbortController(),
      draw() { const flying = [...this.flying.values()].reduce((a, b) => a + b, 0); if (!this.resume) show(form, this.started, { loaded: Math.min(this.sent + flying, file.size), total: file.size, before: this.before }); },
      say(text, left = "") {
        if (this.resume) return; // what is said of the pause stays
        form.querySelector("[data-upload-note]").textContent = text;
        form.querySelector("[data-upload-left]").textContent = left;
      },
      pause() {
        this.say(words.paused.replace("{sent}", size(this.sent)).replace("{size}", size(file.size)), words.continues);
        this.going = new Promise((done) => { this.resume = done; }).then(() => {
          [this.resume, this.started, this.before] = [null, performance.now(), this.sent];
          label(words.pause);
          this.draw();
        });
        label(words.resume);
        this.requests.forEach((xhr) => xhr.abort());
      },
      stop() { this.stopped = true; this.resume?.(); this.abort.abort(); this.requests.forEach((xhr) => xhr.abort()); },
    };
    form.querySelector("[data-upload-cancel]").onclick = async () => {
      run.stop();
      localStorage.removeItem(remembered(file));
      idle(form);
      if (run.plan) await fetch(`${run.base}/${run.plan.id}/cancel`, { method: "POST", headers: run.headers });
    };
    send(run, form).catch((error) => {
      const isStopped = run.stopped;
      run.stop();
      if (!isStopped) fail(form, error.message || words.unstored);
    });
  };
})();
