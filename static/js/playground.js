// Up to four models, one prompt, all streamed. The member's short-lived token comes from data-token-url; replies are text only.
(() => {
  const page = document.querySelector("[data-playground]");
  if (!page) return;
  const $ = (selector, root = page) => root.querySelector(selector);
  const $$ = (selector, root = page) => [...root.querySelectorAll(selector)];
  const form = $("[data-play-form]"), MOST = 4, history = new Map();
  let columns = $$("[data-play-col]"), token = null, running = null;
  columns.forEach((column) => history.set(column, []));

  const csrf = () => $("[name=csrfmiddlewaretoken]")?.value ?? "";
  const bearer = async (renew = false) => {
    if (!renew && token && token.until > Date.now() + 10000) return token.value;
    const answer = await fetch(page.dataset.tokenUrl, { method: "POST", headers: { "X-CSRFToken": csrf(), Accept: "application/json" } });
    if (!answer.ok) throw new Error(answer.status === 403 ? "Your role may not send requests." : `No token for the gateway (${answer.status}). Sign in again.`);
    const body = await answer.json();
    token = { value: body.token, until: Date.now() + 1000 * (body.expires_in ?? 60) };
    return token.value;
  };

  const value = (name) => $(`[data-param="${name}"]`)?.value.trim() ?? "";
  const request = (column, seed) => {
    const system = value("system"), body = { model: $("[data-play-model]", column).value, messages: [] };
    if (system) body.messages.push({ role: "system", content: system });
    body.messages.push(...history.get(column));
    for (const name of ["temperature", "top_p", "max_tokens", "seed"]) if (value(name) !== "") body[name] = Number(value(name));
    if (seed !== undefined) body.seed = seed;
    return { ...body, stream: true, stream_options: { include_usage: true } };
  };

  const make = (tag, className, textContent = "") => Object.assign(document.createElement(tag), { className, textContent });
  const bubble = (column, role, text) => {
    const box = make("div", `bubble bubble-${role}`);
    box.append(make("span", "who", role === "user" ? "You" : $("[data-play-model]", column).selectedOptions[0]?.textContent ?? role), make("div", "txt", text));
    const log = $("[data-play-log]", column);
    $("[data-play-empty]", column)?.remove();
    log.append(box);
    log.scrollTop = log.scrollHeight;
    return box;
  };
  const facts = (box, parts) => {
    const line = make("div", "facts");
    line.append(...parts.filter(Boolean).map((part) => make("span", "", part)));
    box.append(line);
  };
  const regret = ({ message: text }) => document.dispatchEvent(new CustomEvent("toast", { detail: { text, tone: "error" } }));
  const tell = async (url, body) => {
    const answer = await fetch(url, { method: "POST", body: JSON.stringify(body), headers: { "X-CSRFToken": csrf(), "Content-Type": "application/json", Accept: "application/json" } });
    const said = await answer.json().catch(() => null);
    if (!answer.ok) throw new Error(said?.error?.message ?? `The server answered ${answer.status}.`);
    return said;
  };
  const button = (text) => Object.assign(make("button", "btn btn-ghost btn-sm", text), { type: "button" });
  const offer = (box, asked, messages) => {
    const row = make("div", "row wrap");
    if (page.dataset.saveUrl && messages) row.append(saving(messages));
    const again = button("Copy as");
    again.dataset.open = "copy-as";
    again.asked = asked; // the dialog shows this very request
    row.append(again);
    box.append(row);
  };
  const saving = (messages) => {
    const save = button("Save as evaluation row");
    save.addEventListener("click", async () => {
      save.disabled = true;
      try {
        const { url } = await tell(page.dataset.saveUrl, { messages });
        save.replaceWith(Object.assign(make("a", "link xs", "Saved to Playground rows"), { href: url }));
      } catch (error) {
        save.disabled = false;
        regret(error);
      }
    });
    return save;
  };
  let latest = null;
  const showPrompts = async () => {
    const turn = (latest = {}), made = [];
    const asked = columns.filter((column) => $("[data-play-model]", column).value).map((column) => {
      const { model, messages } = request(column), typed = value("prompt");
      if (typed) messages.push({ role: "user", content: typed });
      else while (messages.length && messages.at(-1).role !== "user") messages.pop(); // as it was last asked
      return [$("[data-play-model]", column).selectedOptions[0].textContent, { model, messages }];
    });
    if (!asked.some(([, { messages }]) => messages.length)) throw new Error("Type a message first. The prompt is made from it.");
    for (const [label, body] of asked) {
      const text = make("pre", "raw");
      text.tabIndex = 0; // a long one scrolls
      made.push(make("h3", "sm", label), text);
      try {
        text.textContent = (await tell(page.dataset.promptUrl, body)).prompt;
      } catch (error) {
        text.textContent = error.message;
      }
    }
    if (turn !== latest) return; // asked once more meanwhile
    $("[data-play-prompts]", document).replaceChildren(...made);
    document.getElementById("raw-prompt").showModal();
  };
  const complain = (box, text) => {
    const note = make("div", "note note-bad");
    note.append(make("div", "", text));
    box.append(note);
  };

  // events of a text/event-stream body; the last one is "[DONE]"
  async function* events(body) {
    const reader = body.pipeThrough(new TextDecoderStream()).getReader();
    let buffer = "";
    for (;;) {
      const { done, value: chunk } = await reader.read();
      buffer += chunk ?? "";
      const blocks = buffer.split(/\r?\n\r?\n/);
      buffer = done ? "" : blocks.pop();
      for (const block of blocks) {
        const data = block.split(/\r?\n/).filter((l) => l.startsWith("data:")).map((l) => l.slice(5).trimStart()).join("\n");
        if (data) yield data;
      }
      if (done) return;
    }
  }

  const post = async (body, signal, renew) => fetch(page.dataset.url ?? "/v1/chat/completions", {
    method: "POST", signal, body: JSON.stringify(body),
    headers: { Authorization: `Bearer ${await bearer(renew)}`, "Content-Type": "application/json" },
  });

  // The gateway waits some seconds for an adapter that is being loaded, and then answers 503 until it is there.
  const LOAD_MS = 180000, PAUSE_MS = 1000;
  const postUntilLoaded = async (body, signal) => {
    const end = performance.now() + LOAD_MS;
    for (;;) {
      const answer = await post(body, signal, false);
      if (answer.status !== 503 || performance.now() > end) return answer;
      await new Promise((resume) => setTimeout(resume, PAUSE_MS));
    }
  };

  // how long the first token is waited for, and why: a cold adapter is loaded first
  const count = (box, column) => {
    const line = make("div", "facts"), started = performance.now(), note = $("[data-play-model]", column).selectedOptions[0]?.dataset.note;
    line.setAttribute("aria-live", "off");
    box.append(line);
    const timer = setInterval(() => line.replaceChildren(...[`waiting ${Math.round((performance.now() - started) / 1000)} s`, note].filter(Boolean).map((part) => make("span", "", part))), 1000);
    return () => { clearInterval(timer); line.remove(); };
  };

  const ask = async (column, signal, seed) => {
    const box = bubble(column, "assistant", ""), words = $(".txt", box), log = $("[data-play-log]", column), started = performance.now();
    const body = request(column, seed), stopCounting = count(box, column), prices = $("[data-play-model]", column).selectedOptions[0]?.dataset;
    let first = null, usage = null, reason = null, text = "";
    box.setAttribute("aria-busy", "true");
    try {
      let answer = await (prices?.note ? postUntilLoaded : post)(body, signal, false);
      if (answer.status === 401) answer = await post(body, signal, true);
      if (!answer.ok) throw new Error((await answer.json().catch(() => null))?.error?.message ?? `The gateway answered ${answer.status}.`);
      for await (const data of events(answer.body)) {
        if (data === "[DONE]") break;
        const chunk = JSON.parse(data);
        if (chunk.error) throw new Error(chunk.error.message);
        usage = chunk.usage ?? usage;
        reason = chunk.choices?.[0]?.finish_reason ?? reason;
        const piece = chunk.choices?.[0]?.delta?.content;
        if (!piece) continue;
        if (first === null) {
          first = performance.now();
          stopCounting();
        }
        const low = log.scrollHeight - log.scrollTop - log.clientHeight < 40;
        text += piece;
        words.textContent = text;
        if (low) log.scrollTop = log.scrollHeight;
      }
    } catch (error) {
      if (error.name !== "AbortError") complain(box, error.message);
      else reason = "stopped";
    } finally {
      stopCounting();
      box.removeAttribute("aria-busy");
    }
    if (text) history.get(column).push({ role: "assistant", content: text });
    else history.get(column).pop(); // a question without an answer would spoil the next one
    const seconds = (performance.now() - started) / 1000, writing = first ? (performance.now() - first) / 1000 : 0;
    facts(box, [
      usage && `${usage.prompt_tokens.toLocaleString("en")} in, ${usage.completion_tokens.toLocaleString("en")} out`,
      first && `first token ${Math.round(first - started)} ms`,
      `${seconds.toFixed(2)} s`,
      usage && writing > 0.05 && usage.completion_tokens > 1 && `${((usage.completion_tokens - 1) / writing).toFixed(1)} tok/s`,
      usage && cost(prices, usage),
      seed !== undefined && `seed ${seed}`,
      reason && reason !== "stop" && { length: "cut at the token limit", stopped: "stopped by you" }[reason],
    ]);
    if (text) offer(box, body, reason !== "stopped" && [...body.messages, { role: "assistant", content: text }]);
    log.scrollTop = log.scrollHeight;
  };

  // list prices ride on the chosen option as nano-USD per million tokens; the ledger has the last word
  const cost = ({ input, output } = {}, usage) => {
    if (!input || !output) return null;
    const usd = (usage.prompt_tokens * Number(input) + usage.completion_tokens * Number(output)) / 1e15;
    const cents = Number((usd * 100).toPrecision(2));
    return cents > 0 && cents < 1 ? `${cents.toFixed(10).replace(/0+$/, "")}¢` : `$${usd.toFixed(2)}`;
  };

  const busy = (on) => {
    $("[data-play-send]").hidden = on;
    $("[data-play-stop]").hidden = !on;
  };
  const send = async (prompt) => {
    const used = columns.filter((column) => $("[data-play-model]", column).value);
    // without a seed of the user's, one is drawn for all: what differs is the model alone
    const seed = value("seed") === "" && value("temperature") !== "0" ? crypto.getRandomValues(new Uint32Array(1))[0] : undefined;
    running = new AbortController();
    busy(true);
    for (const column of used) {
      history.get(column).push({ role: "user", content: prompt });
      bubble(column, "user", prompt);
    }
    await Promise.all(used.map((column) => ask(column, running.signal, seed)));
    running = null;
    busy(false);
    $("[data-play-prompt]").focus();
  };

  // columns: the new one begins with the first model that no other has
  const number = () => {
    columns = $$("[data-play-col]");
    columns.forEach((column, index) => column.setAttribute("aria-label", `Column ${index + 1}`));
    $("[data-play-add]").hidden = columns.length >= MOST;
    fill();
  };
  const empty = (column) => {
    const hint = make("p", "sm faint", "Replies stream in here, with tokens, time and cost.");
    hint.dataset.playEmpty = "";
    $("[data-play-log]", column).replaceChildren(hint);
    history.set(column, []);
  };
  const add = () => {
    const last = columns.at(-1), column = last.cloneNode(true), choice = $("[data-play-model]", column);
    const taken = columns.map((other) => $("[data-play-model]", other).value);
    choice.value = [...choice.options].find((option) => option.value && !taken.includes(option.value))?.value ?? taken[0];
    empty(column);
    last.after(column);
    number();
    choice.focus();
  };
  const drop = (column) => {
    history.delete(column);
    column.remove();
    number();
    $("[data-play-prompt]").focus();
  };

  form.addEventListener("submit", (e) => {
    e.preventDefault();
    e.stopPropagation();
    const box = $("[data-play-prompt]"), prompt = box.value.trim();
    if (!prompt || running) return;
    box.value = "";
    send(prompt);
  });
  page.addEventListener("keydown", (e) => {
    if (!e.target.matches("[data-play-prompt]") || e.key !== "Enter" || e.shiftKey || e.isComposing || e.metaKey || e.ctrlKey) return;
    e.preventDefault();
    form.requestSubmit();
  });
  page.addEventListener("click", (e) => {
    if (e.target.closest("[data-play-stop]")) running?.abort();
    if (e.target.closest("[data-play-add]") && !running) add();
    if (e.target.closest("[data-play-drop]") && !running) drop(e.target.closest("[data-play-col]"));
    const copying = e.target.closest("[data-open=copy-as]");
    if (copying) fill(copying.asked);
    if (e.target.closest("[data-play-raw]")) showPrompts().catch(regret);
    if (e.target.closest("[data-play-clear]") && !running) {
      columns.forEach(empty);
      fill();
    }
  });

  // "Copy as" holds the request of one answer, or the next one of the first column; the server wrote the text around it
  const codes = Object.fromEntries(["curl", "python", "javascript"].map((key) => document.getElementById(`copy-as-${key}-code`)).map((code) => [code?.id, code?.textContent]));
  const json = (v, indent = 2) => JSON.stringify(v, null, indent);
  const written = { // strings, numbers, lists and objects of JSON are Python too
    curl: (body) => [/-d '[^]*'/, `-d '${json(body).replaceAll("'", "'\\''")}'`],
    python: (body) => [/create\([^]*?\n\)/, `create(\n${Object.entries(body).map(([k, v]) => `    ${k}=${json(v, 4).replaceAll("\n", "\n    ")},`).join("\n")}\n)`],
    javascript: (body) => [/create\([^]*\);\nc/, `create(${json(body)});\nc`],
  };
  const fill = (asked = request(columns[0])) => {
    const { stream, stream_options, ...body } = asked;
    body.messages = [...body.messages];
    if (body.messages.at(-1)?.role !== "user") body.messages.push({ role: "user", content: value("prompt") || "Hello" });
    for (const key in written) {
      const code = document.getElementById(`copy-as-${key}-code`), [place, text] = written[key](body);
      if (code) code.textContent = codes[code.id].replace(place, () => text);
    }
  };
  page.addEventListener("input", () => fill());
  number();
  $("[data-play-send]").disabled = $("[data-play-prompt]").disabled; // sent before this script has run, the text would be lost
})();
