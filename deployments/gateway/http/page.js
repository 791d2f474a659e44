"use strict";
const PATIENCE_MS = 60000;
const SAMPLES = ["Why is the sky blue?", "Write a Python function that reverses a list.", "Give me five tips for better sleep."];
const REASONS = { disabled: "They are switched off.", load: "None: they do not pay with so many requests.", late: "None arrived in time.",
  low_acceptance: "None: they do not pay here.", no_replica: "None: no smaller model was free.", short: "None: the answer was short.",
  stopped: "Known only for answers that end by themselves." };  // why no guess was scored
const CLEAN = { ALLOWED_ATTR: ["align", "class", "href", "rel", "start", "target"], ALLOWED_URI_REGEXP: /^(https?|mailto):/i,
  ALLOWED_TAGS: ("a blockquote br code del em h1 h2 h3 h4 h5 h6 hr li ol p pre strong table tbody td th thead tr ul").split(" ") };
let names = [], model = null, turns = [], running = null;

const $ = (id) => document.getElementById(id);
const element = (tag, name, text) => Object.assign(document.createElement(tag), { className: name || "", textContent: text || "" });
const [main] = document.getElementsByTagName("main");
const colour = (level) => "l" + level % 6;
const kind = (level, fixed) => "t " + colour(level) + (level === names.length - 1 ? " top" : "") + (fixed ? " fixed" : "");

// HTML and pictures in a model's text are shown as source text.
const literal = ({ raw, block }) => { const words = element("p", "", raw).innerHTML; return block ? `<p>${words}</p>` : words; };
marked.use({ renderer: { html: literal, image: literal } });
DOMPurify.addHook("afterSanitizeAttributes", (node) => { if (node.href) Object.assign(node, { target: "_blank", rel: "noopener noreferrer" }); });

// Parses JSON with seeds as text, since they may be too large for JavaScript's numbers. Quotes in JSON strings are always escaped.
const read = (json) => JSON.parse(json.replace(/"seed":\s*(\d+)/g, '"seed":"$1"'));
const written = (body) => JSON.stringify(body)?.replace(/"seed":"(-?\d+)"/, '"seed":$1');

async function learn() {
  if (model) return;
  [model] = (await (await send("/v1/models")).json()).data;
  names = model.tiers;
  $("served").textContent = model.id;
  $("instructed").hidden = !model.chat;
  const sample = (text) => Object.assign(element("button", "", text), { onclick: () => run(() => ask(text)) });
  if (model.chat) $("samples").append(...SAMPLES.map(sample)); else $("prompt").placeholder = "Begin a text, and the model goes on";
  const chips = names.map((name, level) => element("span", kind(level), name)), full = chips.pop();
  $("legend").append(...chips.length ? ["Whose guess survived:", ...chips, "· written by"] : ["Written by"], full, "itself ·",
    element("span", kind(names.length - 1, true), "replaced a wrong guess"));
  restore();
}

// A request and its answer so far.
const begun = (path, body) => ({ path, body, ids: [], tokens: [], text: "", begin: performance.now(), first: 0, last: 0, head: 0 });
const speed = (of) => of.ids.length > of.head ? 1000 * (of.ids.length - of.head) / (of.last - of.first) : 0;

function take(of, { text, cascade: { seed, edges, undrafted, token_ids = [] }, finish_reason }) {
  of.text += text; of.ids.push(...token_ids);
  of.seed ??= seed; of.edges ??= edges; of.undrafted ??= undrafted; of.end ??= finish_reason;
  if (token_ids.length) of.last = performance.now();
  if (of.ids.length && !of.first) { of.first = of.last; of.head = of.ids.length; }
}

// Shows a request in the conversation, and for each token of its answer a cell in the row of each tier.
function placed(asked) {
  const node = $("answer").content.cloneNode(true).firstElementChild, part = (name) => node.querySelector("." + name);
  const tracks = names.map((name, level) => element("div", "track " + colour(level))), zeros = () => names.map(() => 0);
  part("tiers").append(...names.map((name) => element("div", "", name)).reverse());
  part("tracks").append(...tracks.toReversed());
  const cell = (level, at) => {
    while (tracks[level].children.length <= at) tracks[level].append(element("i", "cell"));
    return tracks[level].children[at].classList;
  };
  const answer = Object.assign(asked, { role: "assistant", node, part, cell, mine: zeros(), wrong: zeros() });
  part("compare").onclick = () => run(() => compare(answer));
  part("copy").onclick = () => copy(answer.text);
  part("said").classList.toggle("plain", !model.chat);
  return answer;
}

// Adds the next piece of the answer: the origin of each token, and where the text ends with it.
function write(answer, { text, cascade: { ends = [], origins = [] } }) {
  const letters = Array.from(text), before = answer.text.length - text.length;
  ends.forEach((end, i) => {
    const level = origins[i] >> 4, wrong = origins[i] & 15;
    answer.tokens.push({ end: before + letters.slice(0, end).join("").length, level, wrong });
  });
  answer.timer ??= setTimeout(() => draw(answer), 50);
}

function draw(answer) {
  const { part, cell, mine, wrong, tokens, text } = answer, follows = main.scrollHeight - main.scrollTop - main.clientHeight < 80;
  clearTimeout(answer.timer);
  answer.timer = null;
  if (model.chat) part("said").innerHTML = DOMPurify.sanitize(marked.parse(text), CLEAN); else part("said").textContent = text;
  colourIn(part("said"), text, tokens);
  mine.fill(0); wrong.fill(0);
  tokens.forEach((token, i) => {
    mine[token.level]++;
    cell(token.level, i).add(token.wrong === token.level ? "kept" : "right");
    if (token.wrong === token.level) return;
    cell(token.wrong, i).add("wrong");
    wrong[token.wrong]++;
  });
  if (tokens.length) tell(answer);
  if (follows) main.scrollTop = main.scrollHeight;
}

// Colours the text in `root` by its tokens. Markdown omits parts of the `source`, so each line is searched after
// the previous one, word by word if it is not there as a whole. Text that is not found has no colour.
function colourIn(root, source, tokens) {
  const walker = document.createTreeWalker(root, NodeFilter.SHOW_TEXT), nodes = [];
  while (walker.nextNode()) nodes.push(walker.currentNode);
  let at = 0, next = 0;
  const spans = (begin, end) => {
    const found = [];
    while (next < tokens.length && tokens[next].end <= begin) next++;
    for (let i = next; begin < end && i < tokens.length; begin = Math.max(begin, tokens[i++].end)) {
      const { end: last, level, wrong } = tokens[i], words = source.slice(begin, Math.min(end, last));
      if (!words) continue;
      const span = element("span", kind(level, wrong !== level), words);
      span.title = names[level] + (wrong !== level ? " corrected " + names[wrong] : level === names.length - 1 ? " said it" : " guessed it");
      found.push(span);
    }
    return found;
  };
  const coloured = (line) => {
    const core = line.trim();
    let begin = core ? source.indexOf(core, at) : -1, end = begin + core.length, left = line.indexOf(core), right = left + core.length;
    if (begin < 0) return /\S\s+\S/.test(line) ? line.split(/(?<=\s)(?=\S)/).flatMap(coloured) : [line];
    while (left > 0 && begin > at && source[begin - 1] === line[left - 1]) { left--; begin--; }
    while (right < line.length && source[end] === line[right]) { right++; end++; }
    at = end;
    return [line.slice(0, left), ...spans(begin, end), source.slice(Math.max(begin, tokens.at(-1)?.end ?? 0), end), line.slice(right)];
  };
  for (const node of nodes) {
    const [, language] = node.parentNode.className.match(/language-(\S+)/) || [];
    if (language) at = Math.max(at, source.indexOf("\n", source.indexOf(language, at)));
    node.replaceWith(...node.data.split(/(?<=\n)/).flatMap(coloured));
  }
}

async function copy(text) {
  try { await navigator.clipboard.writeText(text); } catch {  // pages over plain HTTP have no clipboard
    const box = Object.assign(element("textarea"), { value: text });
    document.body.append(box);
    box.select(); document.execCommand("copy");
    box.remove();
  }
  $("status").textContent = "Copied";
}

function bar(label, share, value, colour = "") {
  const row = element("div", "bar"), rail = element("div");
  rail.append(element("i", colour));
  rail.firstChild.style.width = 100 * share + "%";
  row.append(element("span", "", label), rail, element("span", "", value));
  return row;
}

function tell(answer) {
  const { part, ids, mine, wrong, edges = [] } = answer, rate = speed(answer), full = names.at(-1);
  const passes = edges.filter((e) => e.verifier === full).reduce((sum, e) => sum + e.passes, 0);
  const percent = (share) => Math.round(100 * share) + " %";
  part("speed").textContent = rate ? rate.toFixed(1) : "–";
  part("first").textContent = Math.round(answer.first - answer.begin) + " ms";
  part("passes").textContent = passes ? (ids.length / passes).toFixed(2) : "–";
  part("count").textContent = ids.length;
  part("why").textContent = answer.end === "length" ? "tokens, the limit" : "tokens";
  part("shares").replaceChildren(...mine.map((n) => element("div", "", percent(n / ids.length))).reverse());
  part("tracks").scrollLeft = 1e9;
  part("tracks").ariaLabel = names.map((name, level) => `${name}: ${mine[level]} of ${ids.length} tokens, ${wrong[level]} replaced`)
    .reverse().join("; ");
  part("edges").replaceChildren(...edges.filter((e) => e.drafter && e.proposed).flatMap((e) => {
    const hue = colour(names.indexOf(e.drafter)), kept = e.accepted / e.proposed;
    const row = bar(e.drafter + " → " + e.verifier, kept, percent(kept), hue);
    return e.corrected ? [row, bar("corrections ready", e.prefetched / e.corrected, e.prefetched + " of " + e.corrected, hue)] : [row];
  }));
  part("edges").append(element("p", "note", REASONS[answer.end ? answer.undrafted : "stopped"]));
}

class Broken extends Error {}  // the server is lost; another one may continue

async function reached(work, words) {
  try { return await work; } catch (error) { throw error.name === "AbortError" ? error : new Broken(words); }
}

async function send(path, body) {
  const headers = { "Content-Type": "application/json", ...($("key").value && { Authorization: "Bearer " + $("key").value }) };
  const options = { method: body ? "POST" : "GET", headers, body: written(body), signal: running?.signal };
  const response = await reached(fetch(path, options), "No server answers");
  if (response.ok) return response;
  const words = await response.json().then((said) => said.error.message, () => "The server answered " + response.status);
  throw new (body?.resume && [429, 503].includes(response.status) ? Broken : Error)(words);
}

async function* events(response) {
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  for (let rest = "", whole = false; ;) {
    const { value, done } = await reached(reader.read(), "The connection broke");
    if (done && !whole) throw new Broken("The connection broke");
    if (done) return;
    const parts = (rest + value).split("\n\n");
    rest = parts.pop();
    for (const part of parts) {
      whole = whole || part === "data: [DONE]";
      if (part.startsWith("data: {")) yield read(part.slice(6));
    }
  }
}

// Yields the pieces of an answer. If they break off, it requests the rest after the tokens that have arrived.
async function* pieces(of) {
  for (let pause = 50, heard = performance.now(); ;) {
    try {
      for await (const event of events(await send(of.path, of.body))) {
        if (event.error) throw new (event.error.code === "unavailable" ? Broken : Error)(event.error.message);
        for (const { delta, text, cascade = {}, finish_reason } of event.choices) {
          const piece = { text: (delta ? delta.content : text) || "", cascade, finish_reason };
          take(of, piece);
          yield piece;
        }
        heard = performance.now(); pause = 50;
      }
      return;
    } catch (error) {
      if (!(error instanceof Broken) || !of.ids.length || performance.now() - heard > PATIENCE_MS) throw error;
      Object.assign(of.body, { seed: of.seed, resume: { token_ids: [of.ids] } });
      await new Promise((done) => setTimeout(done, pause * (.5 + Math.random() / 2)));
      pause = Math.min(2 * pause, 2000);
    }
  }
}

function request(before) {
  const number = (id) => $(id).value === "" ? undefined : +$(id).value, system = $("system").value.trim();
  const sampling = { max_tokens: number("max"), temperature: number("temperature"), seed: $("seed").value || undefined };
  const body = { ...sampling, stream: true, history: true };
  if (!model.chat) return begun("/v1/completions", { ...body, prompt: before.map((turn) => turn.text).join("") });
  const messages = before.map(({ role, text }) => ({ role, content: text }));
  if (system) messages.unshift({ role: "system", content: system });
  return begun("/v1/chat/completions", { ...body, messages, separate_reasoning: false });  // `ends` refer to the whole text
}

async function ask(text) {
  await learn();
  const question = { role: "user", text, node: element("div", "asked", text) }, answer = placed(request([...turns, question]));
  for (const panel of document.querySelectorAll("article > details")) panel.open = false;
  turns.push(question, answer); $("log").append(question.node, answer.node);
  if ($("welcome").contains(document.activeElement)) $("go").focus();
  $("welcome").hidden = true;
  if ($("prompt").value === text) $("prompt").value = "";
  main.scrollTop = main.scrollHeight;
  try {
    for await (const piece of pieces(answer)) {
      write(answer, piece);
      answer.part("pair").hidden = names.length < 2 || !piece.finish_reason;
    }
  } finally {
    if (answer.ids.length) {
      ended(answer);
      keep();
      $("status").textContent = `Answered with ${answer.ids.length} tokens`;
    } else if (turns.includes(question)) {  // nothing has arrived: put the question back into the input
      turns.splice(-2);
      question.node.remove(); answer.node.remove();
      $("prompt").value ||= text; $("welcome").hidden = turns.length > 0;
    }
  }
}

function ended(answer) {
  draw(answer);
  answer.part("pair").hidden = names.length < 2;
  answer.node.querySelector("summary").textContent = `How it was written: ${answer.ids.length} tokens`;
}

// The conversation stays, with its system message, while its tab is open, as long as the same models are served.
const place = () => `cascade ${model.id} ${names}`;

function keep() {
  const whole = turns.filter((turn, i) => (turn.ids || turns[i + 1]?.ids)?.length);
  const plain = whole.map(({ node, part, cell, mine, wrong, timer, ...rest }) => rest);
  try { sessionStorage.setItem(place(), JSON.stringify({ system: $("system").value, turns: plain })); } catch {}  // too long for a tab's storage
}

function restore() {
  const kept = JSON.parse(sessionStorage.getItem(place()) || '{ "system": "", "turns": [] }');
  $("system").value = kept.system;
  turns = kept.turns;
  for (const turn of turns) {
    if (turn.role === "user") turn.node = element("div", "asked", turn.text); else ended(placed(turn));
    $("log").append(turn.node);
  }
  for (const panel of document.querySelectorAll("article:not(:last-child) > details")) panel.open = false;
  $("welcome").hidden = turns.length > 0;
  main.scrollTop = main.scrollHeight;
}

async function compare(answer) {
  const body = { ...answer.body, seed: answer.seed, max_tokens: answer.ids.length, resume: undefined };
  const alone = begun(answer.path, { ...body, speculation: { mode: "off" } }), ours = speed(answer), { ids, part } = answer;
  for await (const piece of pieces(alone)) {
    const theirs = speed(alone), most = Math.max(ours, theirs) || 1, differs = alone.ids.findIndex((id, i) => id !== ids[i]);
    const row = (name, rate) => bar(name, rate / most, rate ? rate.toFixed(1) + " tok/s" : "…");
    part("speeds").replaceChildren(row("cascade", ours), row(names.at(-1) + " alone", theirs));
    part("verdict").textContent = differs >= 0 ? `Another text from token ${differs + 1} on.`
      : alone.ids.length < ids.length ? `${alone.ids.length} of ${ids.length} tokens, the same so far.`
      : `The same text, all ${ids.length} tokens` + (theirs ? `; the cascade was ${(ours / theirs).toFixed(2)} times as fast.` : ".");
  }
}

// Does one thing at a time, which can be stopped.
async function run(work) {
  if (running) return;
  const busy = (now) => {
    $("go").textContent = now ? "Stop" : "Send";
    for (const button of document.querySelectorAll(".compare")) button.disabled = now;
  };
  running = new AbortController();
  $("error").hidden = true; $("status").textContent = "Answering";
  busy(true);
  try { await work(); } catch (error) {
    $("error").hidden = error.name === "AbortError";
    $("error").textContent = error.message;
  } finally { running = null; busy(false); }
}

$("form").onsubmit = (event) => {
  event.preventDefault();
  if (running) running.abort();
  else if ($("prompt").value.trim()) run(() => ask($("prompt").value));
};
$("go").onclick = (event) => { if (event.detail > 1) event.preventDefault(); };  // a double click does not stop its own request
$("prompt").onkeydown = (event) => {
  if (event.key !== "Enter" || event.shiftKey || event.isComposing) return;
  event.preventDefault();
  if (!running) $("form").requestSubmit();
};
onkeydown = (event) => { if (event.key === "Escape" && running) running.abort(); };
$("new").onclick = () => {
  if (running) running.abort();
  turns = []; keep();
  $("log").replaceChildren();
  $("welcome").hidden = false; $("error").hidden = true;
  $("prompt").focus();
};
onpagehide = () => { if (model) keep(); };
learn().catch(() => {});
