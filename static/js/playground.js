// Up to four models, one prompt, all streamed. The page itself is the conversation: bubbles with data-role, votes as pressed buttons.
(() => {
  const page = document.querySelector("[data-playground]");
  if (!page) return;
  const $ = (selector, root = page) => root.querySelector(selector);
  const $$ = (selector, root = page) => [...root.querySelectorAll(selector)];
  const form = $("[data-play-form]"), words = $("[data-words=play]", document).dataset, MOST = 4;
  let columns = $$("[data-play-col]"), token = null, running = null, kept = Promise.resolve();

  // the token of the present session, which another tab may have begun
  const csrf = () => (document.cookie.match(/(?:^|; )__Host-csrf=(\w+)/) ?? document.cookie.match(/(?:^|; )csrftoken=(\w+)/))[1];
  const tell = async (url, body) => {
    const answer = await fetch(url, { method: "POST", body: JSON.stringify(body), headers: { "X-CSRFToken": csrf(), "Content-Type": "application/json", Accept: "application/json" } });
    const told = await answer.json().catch(() => null);
    if (!answer.ok || !told) throw new Error(told?.error?.message ?? words.failed.replace("{status}", answer.status));
    return told;
  };
  const bearer = async (renew = false) => {
    if (renew || !token || token.until < Date.now() + 10000) {
      const { token: value, expires_in } = await tell(page.dataset.tokenUrl, {});
      token = { value, until: Date.now() + 1000 * expires_in };
    }
    return token.value;
  };

  // unsent text outlives a reload, in its project alone
  const prompt = $("[data-play-prompt]"), unsent = `unsent:${page.dataset.tokenUrl}`;
  const write = (text) => { sessionStorage.setItem(unsent, prompt.value = text); };
  const typed = () => prompt.value.trim();
  const modelOf = (column) => $("[data-play-model]", column);
  const settings = () => {
    const found = { models: columns.map((column) => modelOf(column).value) };
    for (const { type, value, dataset } of $$("[data-param]")) if (value.trim()) found[dataset.param] = type === "number" ? Number(value) : value;
    return found;
  };
  const format = ({ response_format: type, schema = "" }) => {
    if (type !== "json_schema") return { type };
    try { schema = JSON.parse(schema); } catch {} // the gateway names the fault
    return { type, json_schema: { name: "answer", strict: true, schema } };
  };
  const said = (box) => ({ role: box.dataset.role, content: $(".txt", box).textContent });
  const turns = (column, before) => {
    const all = $$("[data-role]", column);
    return all.slice(0, before ? all.indexOf(before) : all.length);
  };
  const request = (column, { seed, before } = {}) => {
    const now = settings(), { system, models, schema, ...rest } = now, body = { model: modelOf(column).value, messages: turns(column, before).map(said), seed, ...rest };
    if (system) body.messages.unshift({ role: "system", content: system });
    if (body.response_format) body.response_format = format(now);
    return { ...body, stream: true, stream_options: { include_usage: true } };
  };

  const make = (tag, className, textContent = "") => Object.assign(document.createElement(tag), { className, textContent });
  const bubble = (column, role, text) => {
    const box = make("div", `bubble bubble-${role}`);
    box.dataset.role = role;
    box.append(make("span", "who", role === "user" ? words.you : modelOf(column).selectedOptions[0]?.textContent ?? role), make("div", "txt", text));
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
  const say = (text, tone) => document.dispatchEvent(new CustomEvent("toast", { detail: { text, tone } }));
  const regret = ({ message }) => say(message, "error");

  // votes, and rows made of answers: a better answer is preferred to the other to the same messages
  const voteOf = (box) => $("[data-vote][aria-pressed=true]", box)?.dataset.vote ?? "";
  const vote = (box, to) => { for (const n of $$("[data-vote]", box)) n.ariaPressed = n.dataset.vote === to; };
  const rivalOf = (box) => {
    const column = box.closest("[data-play-col]"), other = columns.find((one) => one !== column), before = turns(column, box), rival = columns.length === 2 && turns(other)[before.length];
    return rival && JSON.stringify(before.map(said)) === JSON.stringify(turns(other, rival).map(said)) ? rival : null;
  };
  const rejectedBy = (box) => {
    const rival = rivalOf(box);
    return rival && voteOf(box) === "up" && voteOf(rival) === "down" ? said(rival).content : "";
  };
  const judge = () => {
    for (const n of $$("[data-better]")) n.hidden = !rivalOf(n.closest("[data-role]"));
    for (const n of $$("[data-play-save]")) n.textContent = rejectedBy(n.closest("[data-role]")) ? words.preference : words.row;
  };
  const offer = (box, asked) => {
    const actions = $("[data-play-actions]")?.content.cloneNode(true);
    if (actions) box.append(actions);
    box.asked = asked; // "Copy as" shows this very request
  };
  const asked = (box) => box.asked ?? request(box.closest("[data-play-col]"), { before: box });
  const save = async (box, button) => {
    const { messages } = asked(box);
    button.disabled = true;
    try {
      const { url, dataset } = await tell(page.dataset.saveUrl, { messages: [...messages, said(box)], rejected: rejectedBy(box) });
      button.replaceWith(Object.assign(make("a", "link xs", words.saved.replace("{dataset}", () => dataset)), { href: url }));
    } catch (error) {
      button.disabled = false;
      regret(error);
    }
  };
  // in turn: the first gets the id that the next ones name.
  const keep = () => {
    judge();
    const body = { settings: settings(), columns: columns.map((column) => turns(column).map((box) => ({ ...said(box), vote: voteOf(box) }))) };
    if (page.dataset.keepUrl && body.columns.flat().length) kept = kept.then(() => store(body)).catch(regret);
  };
  const store = async (body) => {
    const { conversation: id, keptAt } = page.dataset, told = await tell(page.dataset.keepUrl, { ...body, id, kept_at: keptAt || null });
    identify(told.id, told.kept_at);
    if (id && id !== told.id) say(words.copied);
  };
  const identify = (id, keptAt = "") => {
    [page.dataset.conversation, page.dataset.keptAt] = [id, keptAt];
    history.replaceState(null, "", id ? `?conversation=${id}` : location.pathname);
  };
  let latest = null;
  const showPrompts = async () => {
    const turn = (latest = {}), made = [];
    for (const column of columns) {
      const { model, messages } = request(column), text = make("pre", "raw");
      if (typed()) messages.push({ role: "user", content: typed() });
      else while (messages.length && messages.at(-1).role !== "user") messages.pop(); // as it was last asked
      if (!model || !messages.length) continue;
      text.tabIndex = 0; // a long one scrolls
      text.textContent = await tell(page.dataset.promptUrl, { model, messages }).then((told) => told.prompt, (error) => error.message);
      made.push(make("h3", "sm", modelOf(column).selectedOptions[0].textContent), text);
    }
    if (!made.length) throw new Error(words.untyped);
    if (turn !== latest) return; // asked once more meanwhile
    $("[data-play-prompts]", document).replaceChildren(...made);
    document.getElementById("raw-prompt").showModal();
  };
  const complain = (box, text) => {
    const note = make("div", "note note-bad");
    note.append(make("div", "", text));
    box.append(note);
  };
  const fault = (text) => {
    for (const n of $$("[data-play-fault]")) {
      n.hidden = !text;
      $("span", n).textContent = text;
      $("#schema").ariaInvalid = Boolean(text);
    }
  };

  // The gateway writes each event of its stream on one line; the last one is "[DONE]".
  async function* events(body) {
    const reader = body.pipeThrough(new TextDecoderStream()).getReader();
    for (let rest = "", read; !(read = await reader.read()).done;) {
      const lines = (rest + read.value).split("\n");
      rest = lines.pop();
      for (const line of lines) if (line.startsWith("data:")) yield line.slice(5).trim();
    }
  }

  const post = async (body, signal, renew) => fetch("/v1/chat/completions", {
    method: "POST", signal, body: JSON.stringify(body),
    headers: { Authorization: `Bearer ${await bearer(renew)}`, "Content-Type": "application/json" },
  });

  // The gateway waits some seconds for an adapter that is being loaded, and then answers 503 until it is there.
  const LOAD_MS = 180000, PAUSE_MS = 1000;
  const postUntilLoaded = async (body, signal) => {
    const end = performance.now() + LOAD_MS;
    for (;;) {
      const answer = await post(body, signal);
      if (answer.status !== 503 || performance.now() > end) return answer;
      await new Promise((resume) => setTimeout(resume, PAUSE_MS));
    }
  };

  // the seconds until the first token, and why: a cold adapter loads first
  const count = (box, column) => {
    const line = make("div", "facts"), started = performance.now(), note = modelOf(column).selectedOptions[0]?.dataset.note;
    line.ariaLive = "off";
    box.append(line);
    const timer = setInterval(() => line.replaceChildren(...[words.waiting.replace("{seconds}", Math.round((performance.now() - started) / 1000)), note].filter(Boolean).map((part) => make("span", "", part))), 1000);
    return () => { clearInterval(timer); line.remove(); };
  };

  const ask = async (column, question, all, seed) => {
    const own = new AbortController(), signal = AbortSignal.any([all, own.signal]), body = request(column, { seed });
    const box = bubble(column, "assistant", ""), line = $(".txt", box), log = $("[data-play-log]", column), started = performance.now();
    const stopCounting = count(box, column), prices = modelOf(column).selectedOptions[0]?.dataset;
    const stop = Object.assign(make("button", "btn btn-sm", words.stop), { type: "button", onclick: () => own.abort() });
    box.append(stop);
    let first = null, usage = null, reason = null, text = "";
    box.ariaBusy = true;
    try {
      let answer = await (prices?.note ? postUntilLoaded : post)(body, signal);
      if (answer.status === 401) answer = await post(body, signal, true);
      if (!answer.ok) throw (await answer.json().catch(() => null))?.error ?? new Error(words.failed.replace("{status}", answer.status));
      for await (const data of events(answer.body)) {
        if (data === "[DONE]") break;
        const chunk = JSON.parse(data);
        if (chunk.error) throw chunk.error;
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
        line.textContent = text;
        if (low) log.scrollTop = log.scrollHeight;
      }
    } catch (error) {
      if (error.name === "AbortError") reason = "stopped";
      else complain(box, error.message);
      if (error.param?.startsWith("response_format")) fault(error.message);
    } finally {
      stopCounting();
      stop.remove();
      box.ariaBusy = null;
    }
    if (!text) for (const silent of [question, box]) delete silent.dataset.role; // without an answer it would spoil the next one
    const seconds = (performance.now() - started) / 1000, writing = first ? (performance.now() - first) / 1000 : 0;
    facts(box, [
      usage && words.usage.replace("{input}", usage.prompt_tokens.toLocaleString("en")).replace("{output}", usage.completion_tokens.toLocaleString("en")),
      first && words.first.replace("{milliseconds}", Math.round(first - started)),
      `${seconds.toFixed(2)} s`,
      usage && writing > 0.05 && usage.completion_tokens > 1 && `${((usage.completion_tokens - 1) / writing).toFixed(1)} tok/s`,
      usage && cost(prices, usage),
      seed !== undefined && `seed ${seed}`,
      reason && reason !== "stop" && { length: words.cut, stopped: words.stopped }[reason],
    ]);
    if (text) offer(box, body);
    log.scrollTop = log.scrollHeight;
    return text;
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
  const send = async (question) => {
    const used = columns.filter((column) => modelOf(column).value);
    // without a seed of the user's, one is drawn for all: what differs is the model alone
    const { seed: given, temperature, response_format } = settings(), seed = given === undefined && temperature !== 0 ? crypto.getRandomValues(new Uint32Array(1))[0] : undefined;
    running = new AbortController();
    busy(true);
    fault("");
    const waiting = used.map((column) => [column, bubble(column, "user", question), running.signal, seed]);
    const atOnce = response_format ? 2 : MOST, answers = []; // the gateway takes no more requests with a format
    while (waiting.length) answers.push(...await Promise.all(waiting.splice(0, atOnce).map((one) => ask(...one))));
    if (!answers.some(Boolean) && !typed()) write(question); // to be sent again
    keep();
    running = null;
    busy(false);
    if (!document.activeElement?.offsetParent) prompt.focus();
  };

  // columns: the new one begins with the first model that no other has
  const number = () => {
    columns = $$("[data-play-col]");
    columns.forEach((column, index) => { column.ariaLabel = words.column.replace("{number}", index + 1); });
    $("[data-play-add]").hidden = columns.length >= MOST;
    judge();
    fill();
  };
  const empty = (column) => {
    const hint = make("p", "sm faint", words.empty);
    hint.dataset.playEmpty = "";
    $("[data-play-log]", column).replaceChildren(hint);
  };
  const add = () => {
    const last = columns.at(-1), column = last.cloneNode(true), choice = modelOf(column);
    const taken = columns.map((other) => modelOf(other).value);
    choice.value = [...choice.options].find((option) => option.value && !taken.includes(option.value))?.value ?? taken[0];
    empty(column);
    last.after(column);
    number();
    choice.focus();
  };
  const drop = (column) => {
    column.remove();
    number();
    prompt.focus();
  };

  form.addEventListener("submit", (e) => {
    e.preventDefault();
    e.stopPropagation();
    const question = typed();
    if (!question || running) return;
    write("");
    send(question);
  });
  page.addEventListener("keydown", (e) => {
    if (e.target !== prompt || e.key !== "Enter" || e.shiftKey || e.isComposing || e.metaKey || e.ctrlKey) return;
    e.preventDefault();
    form.requestSubmit();
  });
  page.addEventListener("click", (e) => {
    const hit = (selector) => e.target.closest(selector), box = hit("[data-role]"), chosen = hit("[data-vote]"), better = hit("[data-better]"), saving = hit("[data-play-save]");
    if (hit("[data-play-stop]")) running?.abort();
    if (hit("[data-play-add]") && !running) add();
    if (hit("[data-play-drop]") && !running) drop(hit("[data-play-col]"));
    if (hit("[data-play-raw]")) showPrompts().catch(regret);
    if (hit("[data-play-clear]") && !running) {
      columns.forEach(empty);
      kept = kept.then(() => identify(""));
    }
    if (hit("[data-open=copy-as]")) copyAs(box ? asked(box) : request(columns[0])).catch(regret);
    if (saving) save(box, saving);
    if (chosen) vote(box, chosen.dataset.vote === voteOf(box) ? "" : chosen.dataset.vote);
    if (better) {
      vote(rivalOf(box), "down");
      vote(box, "up");
    }
    if (chosen || better) keep();
  });

  // "Copy as" holds the request of one answer, or the next one of the first column; the server writes the code
  const copyAs = async ({ stream, stream_options, ...body }) => {
    if (body.messages.at(-1)?.role !== "user") body.messages = [...body.messages, { role: "user", content: typed() || "Hello" }];
    for (const [key, code] of Object.entries(await tell(page.dataset.codeUrl, body))) for (const n of $$(`#copy-as-${key}-code`, document)) n.textContent = code;
  };
  const fill = () => {
    const now = settings();
    for (const n of $$("[data-play-schema]")) n.hidden = now.response_format !== "json_schema";
    for (const n of $$("[data-play-settings]", document)) n.value = JSON.stringify(now);
  };
  page.addEventListener("input", fill);
  prompt.addEventListener("input", () => write(prompt.value));
  if (!prompt.value) prompt.value = sessionStorage.getItem(unsent) ?? "";
  number();
  $("[data-play-send]").disabled = prompt.disabled; // sent before this script has run, the text would be lost
})();
