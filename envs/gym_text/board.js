// Shows the newest board up to the chosen message as colored cells.
const COLORS = { S: "#9bd", F: "#def", H: "#345", G: "#fb4", ".": "#ddd", C: "#a33" };

function render(episode, message, place) {
  const board = episode.messages.slice(0, message + 1).map(rows).filter((found) => found.length).pop() ?? [];
  place.replaceChildren(...board.map((row) => {
    const line = document.createElement("div");
    line.style.cssText = "display:flex";
    for (const letter of row) {
      const cell = document.createElement("span");
      cell.textContent = letter;
      cell.style.cssText = `width:2em;height:2em;line-height:2em;text-align:center;margin:1px;color:#000;background:${COLORS[letter.toUpperCase()] ?? "#eee"}`;
      line.append(cell);
    }
    return line;
  }));
  if (!board.length) place.textContent = "No board yet.";
}

function rows(message) {
  const text = typeof message.content === "string" ? message.content : (message.content ?? []).filter((part) => typeof part === "string").join("\n");
  return text.split("\n").map((line) => line.trim()).filter((line) => /^[SFHGsfhg\[\]()*@]{3,16}$/.test(line));
}
