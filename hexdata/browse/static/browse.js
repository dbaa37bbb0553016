"use strict";

// The page of `hexdata browse`. Each view is a function of the address after the #, such as #game=17&ply=30.
// Texts of the store are only ever written as text, never as HTML.

const view = document.getElementById("view");
let store = null; // facts of the store, read once
let turn = 0; // number of the view that is shown; answers for earlier views are dropped
let keys = null; // keyboard handler of the view

// Elements

function fill(element, attributes, children) {
  for (const [name, value] of Object.entries(attributes || {})) {
    if (value === undefined || value === null || value === false) continue;
    if (name.startsWith("on")) element.addEventListener(name.slice(2), value);
    else element.setAttribute(name, value === true ? "" : value);
  }
  for (const child of children.flat(Infinity)) {
    if (child !== null && child !== undefined && child !== false) element.append(child);
  }
  return element;
}
const el = (name, attributes, ...children) => fill(document.createElement(name), attributes, children);
// An empty value names a view, as in #games; URLSearchParams would write #games=.
const link = (facts) => "#" + new URLSearchParams(Object.entries(facts).filter(([, v]) => v !== undefined && v !== null))
  .toString().replace(/=(?=&|$)/g, "");
const thousands = (number) => number.toLocaleString("en-US");
const plural = (number, one, many) => `${thousands(number)} ${number === 1 ? one : many}`;
// From 9.95 % on, a share is rounded to 10 % and needs no decimal.
const percent = (share) => `${(100 * share).toFixed(share > 0 && share < 0.0995 ? 1 : 0)} %`;
const colour = (name) => name ? el("span", {class: `is-${name}`}, name) : el("span", {class: "muted"}, "unknown");
// An area that scrolls takes the focus, so that the keyboard scrolls it, too.
const scroll = (name, kind, ...children) => el("div", {class: `scroll ${kind}`, tabindex: 0, role: "region", "aria-label": name}, ...children);
const bar = (share, kind) => {
  const inner = el("span", {class: kind || ""});
  inner.style.width = `${100 * share}%`;
  return inner;
};

// Data

class Failure extends Error {
  constructor(lines) { super(lines.join("\n")); this.lines = lines; }
}

async function ask(path, parameters) {
  let answer, content;
  try {
    answer = await fetch(`${path}?${new URLSearchParams(Object.entries(parameters || {})
      .filter(([, v]) => v !== undefined && v !== null && v !== ""))}`);
    content = await answer.json();
  } catch {
    throw new Failure([answer ? "The server has failed." :
      "The server does not answer. If `hexdata browse` has ended, start it again and reload this page."]);
  }
  if (!answer.ok) throw new Failure(content.error);
  return content;
}

// Boards. The server draws them; the empty board, which they repeat, is in the page once.

function drawing(text) {
  const parsed = new DOMParser().parseFromString(text, "image/svg+xml").documentElement;
  return document.importNode(parsed, true);
}

function caption(position) {
  const game = position.game_id === null ? "No known game" : `Game ${position.game_id}`;
  return position.ply === null ? game : `${game}, ply ${position.ply}`;
}
const valueText = (value) => value === 0 ? "blue wins" : value === 1 ? "red wins" : `red wins ${percent(value)}`;

// Parts of views

function title(text, ...about) {
  document.title = `${text} · ${store ? store.name : "hexdata"}`;
  return [el("h1", {}, text), about.length ? el("p", {class: "about"}, about) : null];
}

function failed(error) {
  const lines = error instanceof Failure ? error.lines : [String(error)];
  return el("div", {class: "card error", role: "alert"}, el("pre", {}, lines.join("\n")));
}

function pager(page, facts, name, size) {
  const {start} = page, shown = page.rows.length, most = page.readable;
  const to = (first) => link({...facts, start: first || undefined});
  // A link cannot be disabled, so a disabled button replaces it.
  const button = (text, first, enabled) => enabled
    ? el("a", {class: "button", href: to(first)}, text)
    : el("button", {type: "button", disabled: true}, text);
  const final = Math.max(0, Math.floor((most - 1) / size) * size);
  return el("div", {class: "row"},
    button("First", 0, start > 0), button("Previous", Math.max(0, start - size), start > 0),
    el("span", {}, shown ? `${thousands(start + 1)} to ${thousands(start + shown)} of ${plural(page.found, name, name + "s")}`
      : `No ${name}s here`),
    button("Next", start + size, start + shown < most),
    button("Last", final, start < final));
}

const flagged = (flag) => link({games: "", filter: `list_contains(flags, '${flag.replaceAll("'", "''")}')`});

function gamesTable(rows) {
  // In a narrow window, each cell is a line of its own with the name of its column (browse.css).
  const cell = (name, kind, ...children) => el("td", {"data-name": name, class: kind}, ...children);
  return scroll("Games", "", el("table", {class: "stacked"},
    el("thead", {}, el("tr", {}, ["Game", "First moves", "Moves", "Winner", "End", "Split", "Source", "Notes"].map((name) =>
      el("th", {class: name === "Game" || name === "Moves" ? "number" : "", scope: "col"}, name)))),
    el("tbody", {}, rows.map((row) => el("tr", {},
      cell("Game", "number", el("a", {href: link({game: row.game})}, String(row.game))),
      cell("First moves", "moves", row.opening.join(" ")),
      cell("Moves", "number", row.moves === null ? el("span", {class: "muted"}, "not all known") : String(row.moves)),
      cell("Winner", "", colour(row.winner)),
      cell("End", "", row.end || ""),
      cell("Split", "", row.split || ""),
      cell("Source", "", row.source || ""),
      cell("Notes", "",
        row.duplicate_of === null ? null : el("a", {class: "tag", href: link({game: row.duplicate_of})}, `same as game ${row.duplicate_of}`),
        row.flags.map((flag) => el("a", {class: "tag", href: flagged(flag)}, flag))))))));
}

function album(positions) {
  return el("ul", {class: "album"}, positions.map((position) => el("li", {}, el("a", {
    href: position.game_id !== null && position.ply !== null ? link({game: position.game_id, ply: position.ply}) : link({position: position.position_id}),
  },
  drawing(position.svg),
  el("b", {}, caption(position)),
  el("small", {}, [`${position.player_to_move} to move${position.move === null ? "" : `: ${position.move}`}`,
    position.value === null ? null : valueText(position.value)].filter(Boolean).join(", "))))));
}

// Lists

const EXAMPLES = {
  games: [
    ["winner = 'RED' AND len(moves) < 40", "short games that red won"],
    ["end_reason = 'resigned'", "resigned games"],
    ["duplicate_of IS NOT NULL", "duplicates"],
    ["split = 'val'", "games for validation"],
  ],
  positions: [
    ["position_in_game = 30", "every game after 30 moves"],
    ["move IS NULL", "final positions"],
    ["stones(board) < 6", "fewer than six stones"],
    ["value = 1 AND player_to_move = 0", "blue to move, red wins"],
  ],
};
// Whether conditions in the address may run: after a click, or if the user opened the page.
let trusted = "own" in document.body.dataset;

async function showList(table, facts) {
  const mine = turn, one = table.slice(0, -1), size = table === "games" ? 50 : 24;
  const about = table === "games"
    ? ["One row per game of the store. Click a number to step through the game."]
    : ["Every position that the store has for training. The dashed ring is the move to learn. Click a board to see its game."];
  const filter = el("input", {type: "text", id: "filter", name: "filter", spellcheck: "false", autocapitalize: "off",
    autocomplete: "off", value: facts.filter || "", placeholder: EXAMPLES[table][0][0]});
  const sort = el("input", {type: "text", id: "sort", name: "sort", spellcheck: "false",
    autocapitalize: "off", autocomplete: "off", value: facts.sort || "", placeholder: `${one}_id`});
  const order = el("select", {id: "order", name: "order"},
    el("option", {value: ""}, "smallest first"), el("option", {value: "1", selected: facts.descending === "1"}, "largest first"));
  const submit = (event) => {
    event.preventDefault();
    const wasTrusted = trusted, before = location.hash;
    trusted = true;
    location.hash = link({[table]: "", filter: filter.value.trim() || undefined, sort: sort.value.trim() || undefined,
      descending: order.value || undefined});
    // Applying the condition of the address does not change the address, so there is no event.
    if (!wasTrusted && location.hash === before) show();
  };
  const content = el("div", {});
  const goTo = el("input", {type: "number", id: "goto", min: 0, max: Math.max(0, store.counts[table] - 1), placeholder: "0"});
  view.replaceChildren(...title(table === "games" ? "Games" : "Positions", ...about).filter(Boolean),
    el("div", {class: "card"},
      el("form", {class: "filter", onsubmit: submit, role: "search"},
        el("div", {}, el("label", {for: "filter"}, "Show where (an SQL condition)"), filter),
        el("div", {}, el("label", {for: "sort"}, "Sort by (an SQL number)"), sort),
        el("div", {}, el("label", {for: "order"}, "Order"), order),
        el("button", {class: "main", type: "submit"}, "Apply")),
      el("div", {class: "chips"}, "For example:", EXAMPLES[table].map(([condition, text]) =>
        el("a", {href: link({[table]: "", filter: condition})}, text)),
      facts.filter || facts.sort || facts.descending ? el("a", {href: link({[table]: ""})}, "show all") : null),
      el("details", {}, el("summary", {}, "Columns for conditions"),
        el("p", {}, el("code", {}, store.columns[table].join(", "))),
        el("p", {}, "The functions of ", el("code", {}, "hexdata sql"), " can be used too, such as ",
          el("code", {}, "stones(board)"), " and ", el("code", {}, "cell(move)"), "."))),
    content,
    el("form", {class: "row end goto", onsubmit: (event) => {
      event.preventDefault();
      if (goTo.value !== "") location.hash = link({[one]: goTo.value});
    }}, el("div", {}, el("label", {for: "goto"}, `Open the ${one} with the number`), goTo), el("button", {type: "submit"}, "Open")));

  // Before any request, because a condition from another site can keep this machine busy.
  if (!trusted && (facts.filter || facts.sort)) {
    content.replaceChildren(el("p", {class: "wait"}, "Another page or program opened this address. Press Apply to run its condition."));
    return;
  }
  let shown = null;
  for (;;) {
    const page = await ask("/api/list", {table, filter: facts.filter, sort: facts.sort, descending: facts.descending,
      start: facts.start, count: size}).catch((error) => error);
    // Another view was opened during the wait and has replaced this one.
    if (mine !== turn) return;
    if (page instanceof Error) { content.replaceChildren(failed(page)); return; }
    const state = JSON.stringify(page);
    // An equal page is not drawn again, so that focus and selection remain.
    if (state !== shown) {
      shown = state;
      const rows = page.rows.length === 0
        ? el("p", {class: "wait"}, page.complete ? `No ${one} fits this condition.` : "Nothing found yet.")
        : table === "games" ? gamesTable(page.rows) : album(page.rows);
      content.replaceChildren(...[
        page.complete ? null : el("p", {class: "card", role: "status"}, `Searching: ${plural(page.found, one, one + "s")} found so far …`),
        el("div", {class: "status"}, pager(page, facts, one, size),
          page.complete && page.readable < page.found
            ? el("span", {class: "muted"}, `The first ${thousands(page.readable)} can be opened.`) : null), rows].filter(Boolean));
    }
    if (page.complete) return;
    await new Promise((resolve) => setTimeout(resolve, 350));
    if (mine !== turn) return;
  }
}

// A game

async function savePng(address, name) {
  // The drawing is loaded as an image, in which no script can run.
  const drawing = await (await fetch(address)).blob();
  const source = URL.createObjectURL(drawing);
  const image = new Image();
  image.src = source;
  await image.decode();
  const canvas = el("canvas", {width: 2 * image.naturalWidth, height: 2 * image.naturalHeight});
  const brush = canvas.getContext("2d");
  // The colours of the drawing are those of the light or the dark page, so its background is, too.
  brush.fillStyle = getComputedStyle(document.body).backgroundColor;
  brush.fillRect(0, 0, canvas.width, canvas.height);
  brush.drawImage(image, 0, 0, canvas.width, canvas.height);
  URL.revokeObjectURL(source);
  const saved = URL.createObjectURL(await new Promise((resolve) => canvas.toBlob(resolve, "image/png")));
  el("a", {href: saved, download: name}).click();
  // The browser reads the file after the click has returned.
  setTimeout(() => URL.revokeObjectURL(saved), 10000);
}

function saving(address, name) {
  return [el("a", {class: "button", href: address, download: `${name}.svg`}, "Save SVG"),
    el("button", {type: "button", onclick: () => savePng(address, `${name}.png`)}, "Save PNG")];
}

function targets(position) {
  const list = [], short = (number) => String(Number(number.toPrecision(6)));
  const add = (name, value, ...shown) => {
    if (value !== null && value !== undefined) list.push(el("dt", {}, name), el("dd", {}, ...shown.length ? shown : [value]));
  };
  const value = (number) => number === null ? null : `${short(number)}, that is: ${valueText(number)}`;
  add("To move", colour(position.player_to_move));
  add("Move to learn", position.move || (position.policy.length ? "see the policy" : "none: the game ends here"));
  add("Value", value(position.value));
  add("Search value", value(position.root_value));
  add("Visits", position.visits && thousands(position.visits));
  add("Weight", position.weight && short(position.weight));
  add("Value tier", position.value_sample_tier, String(position.value_sample_tier));
  for (const [name, number] of Object.entries(position.extra)) add(name, number, number === null ? "" : short(number));
  add("Position", el("a", {href: link({position: position.position_id})}, String(position.position_id)));
  add("Metadata", position.metadata, el("code", {}, position.metadata));
  const strongest = position.policy.slice(0, 6), more = position.policy.length - strongest.length;
  return [el("dl", {}, list), strongest.length ? [el("h2", {}, "Policy"), el("div", {class: "share"}, strongest.map(([cell, share]) => [
    el("b", {}, cell), el("span", {class: "bar"}, bar(share)), el("span", {}, percent(share))])),
  more ? el("p", {class: "muted"}, `and ${plural(more, "more cell", "more cells")}`) : null] : null].flat();
}

async function showGame(facts) {
  const mine = turn;
  let game = await ask("/api/game", {game: facts.game}), numbers = false;
  if (mine !== turn) return;
  const plies = game.boards.map((board, k) => board.ply === null ? k : board.ply), last = plies.length - 1;
  const at = (ply) => Math.max(0, plies.indexOf(ply));
  let index = facts.ply === undefined ? 0 : at(Number(facts.ply));
  const figure = el("figure", {class: "boardbox"}), panel = el("section", {class: "card", "aria-label": "This position"});
  const counter = el("output", {"aria-live": "polite"});
  const slider = el("input", {type: "range", min: 0, max: last, "aria-label": "Ply", oninput: () => go(Number(slider.value))});
  const button = (text, label, step) => el("button", {type: "button", "aria-label": label, title: label, onclick: () => go(step())}, text);
  const back = button("◀", "One move back (←)", () => index - 1), forth = button("▶", "One move on (→)", () => index + 1);
  const moves = game.cells === null ? null : scroll("All moves", "movelist", game.cells.map((cell, k) =>
    el("a", {href: link({game: game.game, ply: k + 1}), title: `After move ${k + 1}`,
      onclick: (event) => { event.preventDefault(); go(at(k + 1)); }}, `${k + 1}.${cell}`)));
  const saves = el("div", {class: "controls"});

  function go(next) {
    index = Math.min(Math.max(next, 0), last);
    // In place of a new entry, so that the button Back leaves the game and not one ply of it.
    history.replaceState(null, "", link({game: game.game, ply: plies[index]}));
    draw();
  }
  function draw() {
    const position = game.boards[index], ply = position.ply;
    slider.value = index;
    back.disabled = index === 0;
    forth.disabled = index === last;
    counter.textContent = `ply ${ply === null ? "unknown" : ply}${game.moves === null ? "" : ` of ${game.moves}`}`;
    figure.replaceChildren(drawing(position.svg));
    panel.replaceChildren(el("h2", {}, "This position"), ...targets(position).filter(Boolean));
    const picture = `/board.svg?position=${position.position_id}${numbers ? "&numbers=1" : ""}`;
    saves.replaceChildren(...saving(picture, `game-${game.game}-ply-${plies[index]}`),
      ...(game.hexworld ? [el("a", {class: "button", href: hexworldAt(game.hexworld, ply), target: "_blank", rel: "noopener noreferrer"}, "Open in HexWorld")] : []));
    if (moves) {
      [...moves.children].forEach((each, k) => each.toggleAttribute("aria-current", k + 1 === ply));
      const current = moves.querySelector("[aria-current]");
      // scrollIntoView would also scroll the page.
      if (current) moves.scrollTop = current.offsetTop - moves.offsetTop - moves.clientHeight / 2;
    }
  }
  async function number(event) {
    numbers = event.target.checked;
    // The server draws the boards, and therefore their numbers.
    const drawn = await ask("/api/game", {game: facts.game, numbers: numbers ? 1 : ""});
    if (mine === turn) { game = drawn; draw(); }
  }

  keys = (event) => {
    const steps = {ArrowLeft: index - 1, ArrowRight: index + 1, Home: 0, End: last};
    const others = {ArrowUp: game.game - 1, ArrowDown: game.game + 1};
    if (event.key in steps) { event.preventDefault(); go(steps[event.key]); }
    else if (event.key in others && others[event.key] >= 0 && others[event.key] < store.counts.games) {
      event.preventDefault();
      location.hash = link({game: others[event.key]});
    }
  };

  const about = [];
  const fact = (name, ...value) => about.push(el("dt", {}, name), el("dd", {}, ...value));
  fact("Winner", colour(game.winner), game.end && game.end !== "chain" ? ` (${game.end})` : "");
  fact("Moves", game.moves === null ? "not all known" : String(game.moves));
  fact("Positions", String(game.positions));
  if (game.first !== "blue") fact("Begun by", colour(game.first));
  if (game.swap) fact("Swap", `of ${game.swap}`);
  fact("Split", game.split || "");
  fact("Source", game.source || "unknown");
  if (game.duplicate_of !== null) fact("Same as", el("a", {href: link({game: game.duplicate_of})}, `game ${game.duplicate_of}`));
  if (game.flags.length) fact("Flags", game.flags.map((flag) => el("a", {class: "tag", href: flagged(flag)}, flag)));
  // The tree contains the games of red reflected, so their moves are not found by their names.
  if (game.cells !== null && game.cells.length && game.first === "blue") {
    fact("Opening", el("a", {href: link({openings: moveText(game.cells.slice(0, 3))})}, "in the tree of openings"));
  }
  const box = el("label", {class: "row"}, el("input", {type: "checkbox", onchange: number}), "Number the stones");
  view.replaceChildren(...title(`Game ${game.game}`,
    "Step with the arrow keys ← and →. The dot marks the last move, the dashed ring the next one. Blue connects top to bottom, red left to right.").filter(Boolean),
  el("div", {class: "two"},
    el("div", {}, el("div", {class: "card"}, figure,
      el("div", {class: "controls"},
        button("|◀", "Beginning (Home)", () => 0), back, slider, forth, button("▶|", "End (End)", () => last)),
      el("div", {class: "controls"}, counter, box)), saves),
    el("div", {}, panel,
      el("section", {class: "card", "aria-label": "The game"}, el("h2", {}, "The game"), el("dl", {}, about)),
      moves ? el("section", {class: "card", "aria-label": "Moves"}, el("h2", {}, "Moves"), moves) : null,
      el("div", {class: "row"},
        game.game > 0 ? el("a", {class: "button", href: link({game: game.game - 1})}, "Previous game (↑)") : null,
        game.game + 1 < store.counts.games ? el("a", {class: "button", href: link({game: game.game + 1})}, "Next game (↓)") : null))));
  draw();
}

function hexworldAt(address, ply) {
  // The second comma of the address marks the move at which the board is opened.
  const [head, moves] = [address.slice(0, address.indexOf(",") + 1), address.slice(address.indexOf(",") + 1)];
  const list = moves.match(/[a-z]+[0-9]+|:p/g) || [];
  return ply === null || ply >= list.length ? address : `${head}${list.slice(0, ply).join("")},${list.slice(ply).join("")}`;
}

async function showPosition(facts) {
  const mine = turn, position = await ask("/api/position", {position: facts.position});
  if (mine !== turn) return;
  const number = position.position_id, count = store.counts.positions;
  keys = (event) => {
    const next = {ArrowLeft: number - 1, ArrowRight: number + 1}[event.key];
    if (next !== undefined && next >= 0 && next < count) { event.preventDefault(); location.hash = link({position: next}); }
  };
  view.replaceChildren(...title(`Position ${number}`,
    "One training example of the store. The arrow keys ← and → show its neighbours in the store.").filter(Boolean),
  el("div", {class: "two"},
    el("div", {}, el("div", {class: "card"}, el("figure", {class: "boardbox"}, drawing(position.svg))),
      el("div", {class: "controls"},
        number > 0 ? el("a", {class: "button", href: link({position: number - 1})}, "◀ Previous") : null,
        number + 1 < count ? el("a", {class: "button", href: link({position: number + 1})}, "Next ▶") : null,
        saving(`/board.svg?position=${number}`, `position-${number}`))),
    el("div", {}, el("section", {class: "card"}, el("h2", {}, caption(position)), targets(position)),
    position.game_id === null ? null : el("a", {class: "button", href: link({game: position.game_id, ply: position.ply})}, `Open game ${position.game_id}`))));
}

// Openings

// The text of moves has no name for a pass.
const moveText = (cells) => cells.filter((cell) => cell !== "pass").join("");

async function showOpenings(facts) {
  const mine = turn;
  const node = await ask("/api/openings", {moves: facts.openings});
  if (mine !== turn) return;
  const path = node.moves, player = path.length % 2 ? "red" : "blue";
  const to = (cells) => link({openings: moveText(cells)});
  // From here on, a single game has no other branches.
  const follow = (branch) => branch.games === 1 ? link({game: branch.example, ply: path.length + 1}) : to([...path, branch.move]);
  const real = node.branches.filter((branch) => branch.move !== null && branch.move !== "pass");
  const board = node.svg ? drawing(node.svg) : el("p", {}, "The store has no positions.");
  board.setAttribute("role", "group"); // an image would hide its links
  for (const branch of real) {
    // A shaded cell becomes a link.
    const cell = board.querySelector(`[data-cell="${branch.move}"]`), about = `${branch.move}: ${plural(branch.games, "game", "games")}`;
    const anchor = document.createElementNS(board.namespaceURI, "a");
    fill(anchor, {href: follow(branch), "aria-label": about}, []);
    cell.querySelector("title").textContent = about;
    cell.replaceWith(anchor);
    anchor.append(cell);
  }
  const [blue, red] = node.won, decided = blue + red;
  keys = (event) => {
    if (event.key === "ArrowLeft" && path.length) { event.preventDefault(); location.hash = to(path.slice(0, -1)); }
    if (event.key === "ArrowRight" && real.length && real[0].games > 1) { event.preventDefault(); location.hash = follow(real[0]); }
  };
  const results = (won) => won[0] + won[1] === 0 ? el("span", {class: "muted"}, "unknown") : el("span", {class: "bar", role: "img",
    "aria-label": `blue won ${won[0]}, red won ${won[1]}`, title: `blue won ${thousands(won[0])}, red won ${thousands(won[1])}`},
  bar(won[0] / (won[0] + won[1]), "blue"), bar(won[1] / (won[0] + won[1]), "red"));
  const table = el("table", {}, el("thead", {}, el("tr", {}, el("th", {scope: "col"}, "Move"), el("th", {class: "number", scope: "col"}, "Games"),
    el("th", {class: "number", scope: "col"}, "Share"), el("th", {scope: "col"}, "Won by blue, red"))),
  el("tbody", {}, node.branches.map((branch) => el("tr", {},
    el("td", {}, branch.move === null ? el("a", {href: link({game: branch.example})}, "the game ends")
      : branch.move === "pass" ? "pass" : el("a", {href: follow(branch)}, branch.move),
    branch.games === 1 && branch.move !== null ? el("small", {class: "muted"}, ` game ${branch.example}`) : null),
    el("td", {class: "number"}, thousands(branch.games)),
    el("td", {class: "number"}, percent(branch.games / node.games)),
    el("td", {}, results([branch.blue, branch.red]))))));
  view.replaceChildren(...title("Openings",
    "The moves that games have played from here, with the share of games in each cell. Click a cell or a move to go on. ",
    "Rotated and mirrored positions, and other orders of the same moves, count as one position.").filter(Boolean),
  el("div", {class: "card row"},
    el("a", {href: link({openings: ""})}, "Empty board"),
    path.map((cell, k) => [" › ", el("a", {href: to(path.slice(0, k + 1)), "aria-current": k + 1 === path.length ? "step" : undefined},
      `${k + 1}. ${cell}`)])),
  el("div", {class: "two"},
    el("div", {}, el("div", {class: "card"}, el("figure", {class: "boardbox"}, board)),
      el("div", {class: "controls"},
        path.length ? el("a", {class: "button", href: to(path.slice(0, -1))}, "◀ One move back (←)") : null,
        saving(`/board.svg?moves=${moveText(path)}&numbers=1`, `opening-${moveText(path) || "empty"}`),
        path.length ? el("a", {class: "button", href: node.hexworld, target: "_blank", rel: "noopener noreferrer"}, "Open in HexWorld") : null)),
    el("div", {}, node.games ? [
      el("p", {class: "big"}, el("b", {}, plural(node.games, "game", "games")), decided
        ? [": blue won ", el("span", {class: "is-blue"}, percent(blue / decided)), ", red won ", el("span", {class: "is-red"}, percent(red / decided))]
        : ": no winner is known"),
      el("p", {}, "To move: ", colour(player)), scroll("Moves from here", "tall", table)]
      : el("p", {class: "card"}, path.length >= store.depth ? `The tree ends after ${store.depth} moves.`
        : store.counts.games ? "No game has this position." : "The store has no games."))));
}

// Batches

const ORDERS = {
  loader: ["as Loader delivers them", "The first epoch of Loader(store, mode=\"games\") with seed 0. A batch should show unrelated games."],
  before: ["as they are in the store", "Consecutive positions of the store, before any shuffle: most are from one game."],
  after: ["in the shuffled files", "Consecutive positions of the shuffled files, from which shards are made. They should show unrelated games."],
};

async function showBatches(facts) {
  const mine = turn, order = facts.batches in ORDERS ? facts.batches : "loader";
  const splits = order === "after" ? store.shuffled : store.splits, split = facts.split || splits[0] || "train";
  const count = Math.min(256, Math.max(1, Number(facts.count) || 64)), start = Number(facts.start) || 0;
  const base = {batches: order, split: order === "before" ? undefined : split, count};
  const to = (more) => link({...base, ...more});
  const choose = (name, label, value, values, go) => el("div", {}, el("label", {for: name}, label),
    el("select", {id: name, onchange: (event) => { location.hash = go(event.target.value); }},
      values.map(([each, text]) => el("option", {value: each, selected: String(each) === String(value)}, text))));
  const content = el("div", {}, el("p", {class: "wait", role: "status"}, "Loading … Opening the loader of a large store takes up to a minute."));
  const number = el("input", {type: "number", id: "batch", min: 0, value: Math.floor(start / count)});
  const form = el("form", {class: "card row end", onsubmit: (event) => {
    event.preventDefault();
    location.hash = to({start: Number(number.value) * count || undefined});
  }},
  choose("order", "Order", order, Object.entries(ORDERS).filter(([each]) => each !== "after" || store.shuffled.length).map(([each, [text]]) => [each, text]),
    (value) => link({batches: value, count})),
  order === "before" ? null : choose("split", "Split", split, splits.map((each) => [each, each]), (value) => link({...base, split: value})),
  choose("count", "Positions", count, [16, 64, 256].map((each) => [each, each]),
    // The batch of the new size that contains the first position shown.
    (value) => link({...base, count: value, start: Math.floor(start / value) * value || undefined})),
  el("div", {}, el("label", {for: "batch"}, "Batch"), number), el("button", {type: "submit"}, "Show"));
  view.replaceChildren(...title("Batches", ORDERS[order][1]).filter(Boolean), form, content);
  const page = await ask("/api/batch", {order, split: base.split, start, count}).catch((error) => error);
  if (mine !== turn) return;
  if (page instanceof Error) { content.replaceChildren(failed(page)); return; }
  const known = page.rows.filter((row) => row.game_id !== null), games = new Set(known.map((row) => row.game_id)).size;
  const most = Math.max(0, ...[...known.reduce((counts, row) => counts.set(row.game_id, (counts.get(row.game_id) || 0) + 1), new Map()).values()]);
  const story = `${plural(page.rows.length, "position", "positions")} from ${plural(games, "game", "games")}`
    + (most > 1 ? `; at most ${most} are from one game` : games ? "; no game occurs twice" : "");
  number.max = Math.floor((page.found - 1) / count);
  content.replaceChildren(el("p", {class: "big", role: "status"}, story, "."),
    el("div", {class: "status"}, pager(page, base, "position", count)),
    album(page.rows));
}

// Flags and rejections

async function showReasons(facts) {
  if (facts.reasons) return showRejected(facts, facts.reasons);
  const table = (name, head, rows) => scroll(name, "", el("table", {},
    el("thead", {}, el("tr", {}, head.map((name, k) => el("th", {scope: "col", class: k === 1 ? "number" : ""}, name)))), el("tbody", {}, rows)));
  const most = store.counts.games || 1;
  view.replaceChildren(...title("Flags and rejections",
    "Games that look unusual keep their data and have a flag; you decide whether to train on them. Records that cannot be used were rejected. Nothing was dropped silently.").filter(Boolean),
  el("section", {class: "card"}, el("h2", {}, "Flagged games"), store.flags.length ? table("Flags", ["Flag", "Games", "Share", "Meaning"],
    store.flags.map(([flag, count, meaning]) => el("tr", {}, el("td", {}, el("a", {href: flagged(flag)}, flag)),
      el("td", {class: "number"}, thousands(count)), el("td", {}, percent(count / most)), el("td", {}, meaning))))
    : el("p", {}, "No game has a flag.")),
  el("p", {}, el("a", {href: link({games: "", filter: "duplicate_of IS NOT NULL"})}, "Games that repeat an earlier game"), " of the store, as it is, rotated or mirrored."),
  el("section", {class: "card"}, el("h2", {}, "Rejected records"), store.reasons.length ? table("Reasons", ["Reason", "Records", ""],
    store.reasons.map(([reason, count]) => el("tr", {}, el("td", {}, el("a", {href: link({reasons: reason})}, reason)),
      el("td", {class: "number"}, thousands(count)), el("td", {}, ""))))
    : el("p", {}, "No record was rejected.")));
}

async function showRejected(facts, reason) {
  const mine = turn, size = 50;
  const page = await ask("/api/rejected", {reason, start: facts.start, count: size});
  if (mine !== turn) return;
  view.replaceChildren(...title(`Rejected: ${reason}`, "These records are in no training data. Records are counted from 0 in their file.").filter(Boolean),
    el("p", {}, el("a", {href: link({reasons: ""})}, "◀ All flags and reasons")),
    el("div", {class: "status"}, pager(page, {reasons: reason}, "record", size)),
    scroll("Records", "", el("table", {class: "stacked"},
      el("thead", {}, el("tr", {}, ["File", "Record", "Detail"].map((name) => el("th", {scope: "col"}, name)))),
      el("tbody", {}, page.rows.map((row) => el("tr", {}, el("td", {"data-name": "File"}, row.source || ""),
        el("td", {"data-name": "Record"}, row.record === null ? "whole file" : String(row.record)),
        el("td", {"data-name": "Detail"}, row.detail)))))));
}

// The address

const VIEWS = {
  game: showGame, position: showPosition, openings: showOpenings, batches: showBatches, reasons: showReasons,
  games: (facts) => showList("games", facts), positions: (facts) => showList("positions", facts),
};
const SECTION = {game: "games", position: "positions"};

async function show() {
  turn += 1;
  const mine = turn;
  keys = null;
  const facts = Object.fromEntries(new URLSearchParams(location.hash.slice(1)));
  const name = Object.keys(VIEWS).find((each) => each in facts) || "games";
  for (const each of document.querySelectorAll("nav a")) {
    const here = each.getAttribute("href") === `#${SECTION[name] || name}`;
    if (here) each.setAttribute("aria-current", "page"); else each.removeAttribute("aria-current");
  }
  view.setAttribute("aria-busy", "true");
  try {
    // For each view, because a stage may have changed the store since the last one.
    store = await ask("/api/store");
    document.getElementById("name").textContent = store.name;
    if (store.grid) document.getElementById("shared").replaceChildren(drawing(store.grid));
    if (mine === turn) await VIEWS[name](facts);
  } catch (error) {
    if (mine === turn) view.replaceChildren(el("h1", {}, "This cannot be shown"), failed(error));
  }
  if (mine === turn) view.removeAttribute("aria-busy");
}

window.addEventListener("hashchange", () => { show().then(() => { window.scrollTo(0, 0); }); });
document.addEventListener("keydown", (event) => {
  // In a text, arrow keys move the cursor; with a modifier, they are the browser's.
  const typing = event.target.closest("input:not([type=range]):not([type=checkbox]), select, textarea");
  if (keys && !typing && !event.altKey && !event.ctrlKey && !event.metaKey && !event.shiftKey) keys(event);
});
show();
