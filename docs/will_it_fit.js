// The page "Will it fit?": the planner's answer from recorded points, which lie in atlas/.
// It follows planner/atlas.py, and a test holds both together. No network, no tracking.
"use strict";

(() => {
  const form = document.getElementById("fit");
  if (!form) return;
  const home = new URL("atlas/", document.currentScript.src);
  const state = document.getElementById("fit-state");
  const place = document.getElementById("fit-answer");
  const ALLOCATED = 2, SEVERAL = 9, PARTS = 7;
  const CATEGORIES = ["parameters", "gradients", "optimizer states", "activations", "temporaries"];
  const FIRST = { model: "qwen3-0.6b", length: "1024", batch: "8", card: "RTX 4090", order: "change" };
  const ORDERS = { change: "least change first", fastest: "fastest first", smallest: "smallest first" };
  const TASKS = {
    text_classification: " that classifies texts",
    image_classification: " that classifies pictures",
    speech_recognition: " that writes down 30 seconds of sound in as many tokens as it can",
    image_text_to_text: " with a picture of SIZE x SIZE among the tokens of each sample",
  };
  const loaded = {};
  const field = (name) => form.elements.namedItem(name); // "length" is also a property
  let index;

  const gib = (mib) => (mib / 1024).toFixed(2) + " GiB";
  const count = (n) => n.toLocaleString("en");
  const twoDigits = (n) => count(Number(n.toPrecision(2)));

  function element(name, content, attributes = {}) {
    const made = document.createElement(name);
    for (const [key, value] of Object.entries(attributes)) made.setAttribute(key, value);
    for (const part of [content].flat()) if (part) made.append(part);
    return made;
  }

  async function read(name) {
    if (!loaded[name]) {
      const answer = await fetch(new URL(name + ".json", home));
      if (!answer.ok) throw new Error(name + " is not there");
      loaded[name] = await answer.json();
    }
    return loaded[name];
  }

  // ------------------------------------------------------------------------ the planner's rules
  function ways(asked) {
    const logits = 4 * asked.length * asked.batch * asked.model.vocabulary;
    const large = logits >= index.small_logits * asked.card.memory * 2 ** 20;
    const spares = large ? asked.family.spares : "";
    return [...index.ways.keys()].filter((k) => ["", spares].includes(index.ways[k].logits));
  }

  function recipe(asked, kind, way, microBatch) {
    const name = [kind.name, index.ways[way].name].filter(Boolean).join(", ");
    const known = asked.family.recipes[name];
    const same = (row) => row[0] === asked.length && row[1] === microBatch;
    const at = known ? known.points.findIndex(same) : -1;
    if (at < 0) return null;
    const accumulation = asked.batch / microBatch;
    const start = accumulation === 1 ? ALLOCATED : SEVERAL;
    const row = known.points[at].slice(start, start + PARTS);
    // What the recorded card of the family does not take of itself: allocated, reserved, the rest.
    for (const k of [0, 1, PARTS - 1]) row[k] += asked.card.workspaces;
    const [allocated, reserved, ...parts] = row;
    const need = reserved * (1 + index.margin) + asked.card.context;
    const found = { name, kind, way, microBatch, accumulation, allocated, reserved, parts, need };
    Object.assign(found, { seconds: 0, low: 0, high: 0, limit: "", known });
    const timed = known.seconds[asked.card.like];
    if (timed) {
      const [first, low, high, once, each, limit] = timed[at];
      found.seconds = accumulation === 1 ? first : once + accumulation * each;
      found.low = low * found.seconds;
      found.high = high * found.seconds;
      found.limit = index.limits[limit];
    }
    return found;
  }

  function candidates(asked, kind) {
    const sizes = kind.accumulates
      ? index.micro_batches.filter((n) => asked.batch % n === 0)
      : [asked.batch];
    const found = [];
    for (const way of ways(asked)) {
      if (found.length && index.ways[way].host) break; // slower than what fits
      const own = sizes.map((n) => recipe(asked, kind, way, n));
      const fits = own.filter((one) => one && one.need <= asked.card.memory);
      found.push(...fits);
      if (fits.some((one) => one.microBatch === asked.batch)) break; // what follows saves memory
    }
    const asGood = index.as_fast * Math.min(...found.map((one) => one.seconds));
    const rank = (one) => (one.seconds <= asGood ? 0 : one.seconds);
    const order = (a, b) => rank(a) - rank(b) || a.way - b.way || a.microBatch - b.microBatch;
    return found.sort(order);
  }

  function recipes(asked) {
    const found = [];
    for (const kind of index.kinds) {
      const rivals = kind.adapters ? [] : found.filter((one) => !one.kind.adapters);
      const fastest = Math.min(...rivals.map((one) => one.seconds));
      const [best] = candidates(asked, kind);
      if (best && (!rivals.length || best.seconds * index.faster < fastest)) found.push(best);
    }
    return found;
  }

  // Of each kind that fits what needs least, whatever that takes in time.
  function smallest(asked) {
    const found = [];
    for (const kind of index.kinds) {
      const microBatch = kind.accumulates ? 1 : asked.batch;
      const own = ways(asked).map((way) => recipe(asked, kind, way, microBatch));
      const fits = own.filter((one) => one && one.need <= asked.card.memory);
      const least = index.as_small * Math.min(...fits.map((one) => one.need));
      found.push(...fits.filter((one) => one.need <= least).slice(0, 1));
    }
    return found;
  }

  function inOrder(asked) {
    if (asked.order === "smallest") return smallest(asked).sort((a, b) => a.need - b.need);
    const found = recipes(asked);
    return asked.order === "fastest" ? found.sort((a, b) => a.seconds - b.seconds) : found;
  }

  // What is said of the order, as the command says it.
  function aboutOrder(asked, found) {
    const timed = found.some((one) => one.seconds);
    if (asked.order === "fastest" && !timed) {
      return "The pace of this card is not recorded: least change is first. ";
    }
    return index.orders[asked.order] ? `${index.orders[asked.order]} ` : "Least change is first. ";
  }

  function nearestMiss(asked) {
    const kind = index.kinds.find((one) => one.name === index.smallest);
    return ways(asked).map((way) => recipe(asked, kind, way, 1)).filter(Boolean).pop(); // saves most
  }

  function smallestCard(asked, one) {
    const holds = (card) =>
      card.family === asked.card.family &&
      card.like === card.name &&
      (one.reserved - asked.card.workspaces + card.workspaces) * (1 + index.margin) +
        card.context <= card.memory;
    return index.cards.find(holds);
  }

  // ------------------------------------------------------------------------ what is shown
  function bar(asked, one) {
    const room = Math.max(asked.card.memory, one.need);
    const rest = [one.reserved - one.allocated, one.need - one.reserved];
    const names = [...CATEGORIES, "kept by the allocator", "context and margin"];
    const sizes = [...one.parts, ...rest];
    const pieces = names.map((name, k) =>
      element("span", "", {
        class: "fit-piece",
        style: `width:${(100 * Math.max(0, sizes[k])) / room}%;--step:${k}`,
      }));
    const listed = names.map((name, k) => sizes[k] > 0 && `${name} ${gib(sizes[k])}`);
    const words = listed.filter(Boolean).join(", ");
    const share = Math.round((100 * one.need) / asked.card.memory);
    const picture = element("div", pieces, { class: "fit-bar", "aria-hidden": "true" });
    return [picture, element("p", `${share}% of the card: ${words}.`, { class: "fit-words" })];
  }

  function code(asked, one) {
    const numbers = {
      length: asked.length,
      micro_batch: one.microBatch,
      accumulation: one.accumulation,
      samples: 2 * asked.batch,
    };
    const mark = /\{(length|micro_batch|accumulation|samples)\}/g;
    const text = one.known.code.replace(mark, (_, name) => numbers[name]);
    const copy = element("button", "Copy the code", { type: "button", class: "fit-copy" });
    copy.addEventListener("click", async () => {
      try {
        await navigator.clipboard.writeText(text);
        copy.textContent = "Copied";
      } catch {
        copy.textContent = "This browser does not let a page copy: mark the text";
      }
    });
    const shown = element("pre", element("code", text), { tabindex: "0" });
    return element("details", [element("summary", "Code"), copy, shown]);
  }

  function shown(asked, one, fits) {
    const rows = [];
    const row = (name, value) => rows.push(element("dt", name), element("dd", value));
    row("micro-batch", `${one.microBatch} x ${one.accumulation}`);
    row("needs", `${gib(one.need)} of ${gib(asked.card.memory)}`);
    if (one.seconds) {
      const [middle, low, high] = [one.seconds, one.high, one.low].map((n) => pace(asked, n));
      row(`${unit(asked.model) || "tokens"}/s`, `${middle} (${low} to ${high})`);
      row("limited by", one.limit);
    }
    row("price", one.known.price);
    const small = smallestCard(asked, one);
    row("smallest card", small ? small.name : "none known");
    const lessons = one.known.lessons.map((name, k) => [
      k ? ", " : "",
      element("a", "lesson " + name.slice(0, 2), { href: `../notebooks/${name}.html` }),
    ]);
    if (lessons.length) row("taught in", lessons.flat());
    const title = element("h3", one.name);
    const command = `onegpu predict --script recipe.py --gpu "${asked.card.like}"`;
    const exact = fits && ["The code in a file recipe.py, predicted: ", element("code", command)];
    const parts = [title, ...bar(asked, one), element("dl", rows), code(asked, one)];
    return element("section", [...parts, exact && element("p", exact)], {
      class: "fit-recipe",
      "data-recipe": one.name,
      "data-need": one.need.toFixed(1),
      "data-micro-batch": one.microBatch,
      "data-seconds": one.seconds.toPrecision(4),
    });
  }

  // Pictures and sound are counted in whole samples, of the one length that is recorded, whatever is
  // chosen for texts; of these tokens are counted.
  const unit = (model) => index.samples[model.task];
  const lengthOf = (model, chosen) => (unit(model) ? model.lengths[0] : chosen);
  const pace = (asked, seconds) =>
    twoDigits((asked.batch * (unit(asked.model) ? 1 : asked.length)) / seconds);

  const HEAD = ["memory", "first recipe that fits", "micro-batch", "needs", "a second"];

  const recorded = (asked) => asked.family && asked.model.lengths.includes(asked.length);

  // A row of a view: the question with a model or a card of its own, answered by its first recipe.
  function viewRow(name, size, own) {
    const one = recorded(own) ? inOrder(own)[0] : null;
    const cells = [size, recorded(own) ? "nothing" : "not recorded here", "", "", ""];
    if (one) {
      const batches = `${one.microBatch} x ${one.accumulation}`;
      const counted = unit(own.model) || "tokens";
      const speed = one.seconds ? `${pace(own, one.seconds)} ${counted}` : "unknown";
      cells.splice(1, 4, one.name, batches, gib(one.need), speed);
    }
    const shown = cells.map((cell) => element("td", cell));
    return element("tr", [element("th", name, { scope: "row" }), ...shown], {
      "data-name": name,
      "data-recipe": one ? one.name : "",
    });
  }

  function view(title, label, head, rows) {
    const names = element("tr", head.map((name) => element("th", name, { scope: "col" })));
    const body = element("tbody", rows);
    const table = element("div", element("table", [element("thead", names), body], { class: "table" }), {
      class: "fit-cards",
      tabindex: "0",
      role: "region",
      "aria-label": label,
    });
    return element("details", [element("summary", title), table]);
  }

  // The same question to every card: which one do I rent?
  function allCards(asked) {
    const rows = index.cards.filter((card) => card.like === card.name).map((card) => {
      const own = { ...asked, card, family: asked.model.families[card.family] };
      return viewRow(card.name, gib(card.memory), own);
    });
    const label = "The first recipe that fits, on every card";
    return view("Every card", label, ["card", ...HEAD], rows);
  }

  // The same question for every model: what can I train on this card? Its files come when opened.
  function allModels(asked) {
    const label = "The first recipe that fits, for every model";
    const head = ["model", "parameters", ...HEAD.slice(1)];
    const found = view("Every model", label, head, []);
    const rows = found.querySelector("tbody");
    const fetched = async () => {
      for (const name of index.models) {
        try {
          const model = await read(name);
          const length = lengthOf(model, asked.chosen);
          const own = { ...asked, model, length, family: model.families[asked.card.family] };
          rows.append(viewRow(name, twoDigits(model.parameters / 1e9) + " billion", own));
        } catch (error) {
          const cells = [element("th", name, { scope: "row" }), element("td", error.message)];
          rows.append(element("tr", cells));
        }
      }
    };
    found.addEventListener("toggle", fetched, { once: true });
    return found;
  }

  function command(asked) {
    const card = `"${asked.card.name}"`;
    const order = asked.order === FIRST.order ? "" : ` --order ${asked.order}`;
    const length = unit(asked.model) ? "" : ` --length ${asked.length}`;
    return `onegpu fit --model ${asked.model.model} --gpu ${card}${length} --batch ${asked.batch}` + order;
  }

  function show(asked) {
    place.replaceChildren();
    const left = asked.family ? asked.family.missing.length : 0;
    const rest = left ? `${left} of the planner's recipes are not recorded for this card. ` : "";
    const search = ["The whole search on your machine: ", element("code", command(asked)), "."];
    const whole = [rest, ...search].filter(Boolean);
    if (asked.length > (asked.model.positions || Infinity)) {
      const most = count(asked.model.positions);
      state.textContent = `${asked.model.model} knows ${most} positions: choose fewer tokens.`;
      return;
    }
    if (!asked.family) {
      state.replaceChildren(`Nothing is recorded for ${asked.card.name} here. `, ...whole);
      place.append(allCards(asked), allModels(asked));
      return;
    }
    if (!recorded(asked)) {
      // From a window of attention on a model works otherwise.
      const { model, window, lengths } = asked.model;
      const [least, most] = [lengths[0], lengths.at(-1)].map(count);
      const long = lengths.at(-1) < window && window <= asked.length;
      const why = long
        ? `${model} has a window of ${count(window)} tokens, and nothing as long is recorded here. `
        : `${model} is recorded here for samples of ${least} to ${most} tokens. `;
      state.replaceChildren(why, ...whole);
      place.append(allModels(asked));
      return;
    }
    const found = inOrder(asked);
    const task = (TASKS[asked.model.task] || "").replaceAll("SIZE", asked.model.image_size);
    const about = `${asked.model.hub_id}${task} on ${asked.card.name}`;
    if (found.length) {
      const some = found.length === 1 ? "One recipe fits" : `${found.length} recipes fit`;
      state.replaceChildren(`${about}: ${some}. ${aboutOrder(asked, found)}`, ...whole);
      place.append(allCards(asked), allModels(asked), ...found.map((one) => shown(asked, one, true)));
      return;
    }
    const miss = nearestMiss(asked);
    const nothing = left ? "nothing that is recorded fits" : "nothing fits";
    if (!miss) {
      state.replaceChildren(`${about}: ${nothing}, nor a card that is recorded. `, ...whole);
      place.append(allCards(asked), allModels(asked));
      return;
    }
    const small = smallestCard(asked, miss);
    const remedy = small ? `it would fit on ${small.name}` : "no known card of its kind holds it";
    const words = `${about}: ${nothing}. The nearest miss needs ${gib(miss.need)}: ${remedy}. `;
    state.replaceChildren(words, ...whole);
    place.append(allCards(asked), allModels(asked), shown(asked, miss, false));
  }

  // ------------------------------------------------------------------------ the question
  function fill(name, values, words = (value) => value) {
    const list = field(name);
    list.replaceChildren(...values.map((v) => element("option", words(v), { value: v })));
  }

  function fromLink() {
    const given = new URLSearchParams(location.hash.slice(1));
    const unknown = [];
    for (const name of Object.keys(FIRST)) {
      const list = field(name);
      const known = [...list.options].map((option) => option.value);
      const value = given.get(name);
      if (value !== null && !known.includes(value)) unknown.push(`${name} ${value}`);
      list.value = known.includes(value) ? value : known.includes(FIRST[name]) ? FIRST[name] : known[0];
    }
    return unknown;
  }

  async function answer(unknown = []) {
    try {
      const model = await read(field("model").value);
      const card = index.cards.find((one) => one.name === field("card").value);
      const [chosen, batch, order] = [+field("length").value, +field("batch").value, field("order").value];
      const length = lengthOf(model, chosen);
      field("length").disabled = Boolean(unit(model));
      show({ model, card, family: model.families[card.family], length, chosen, batch, order });
    } catch (error) {
      place.replaceChildren();
      state.textContent = `This page cannot answer: ${error.message}. The command onegpu fit does.`;
    }
    if (unknown.length) {
      const words = `The link asks for ${unknown.join(" and ")}, which is not here; shown is: `;
      state.prepend(words);
    }
  }

  async function start() {
    try {
      index = await read("index");
    } catch (error) {
      state.textContent = `This page cannot answer: ${error.message}. The command onegpu fit does.`;
      return;
    }
    fill("model", index.models);
    fill("length", index.lengths, count);
    fill("batch", index.batches);
    fill("card", index.cards.map((card) => card.name));
    fill("order", Object.keys(index.orders), (name) => ORDERS[name]);
    form.addEventListener("change", () => {
      // Not FormData: it leaves out what is disabled, and this change may be what enables it.
      const asked = new URLSearchParams(Object.keys(FIRST).map((name) => [name, field(name).value]));
      history.replaceState(null, "", "#" + asked);
      answer();
    });
    form.addEventListener("submit", (event) => event.preventDefault());
    addEventListener("hashchange", () => answer(fromLink()));
    answer(fromLink());
  }

  start();
})();
