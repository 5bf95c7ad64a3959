// The search of the documentation site: the same words and order as the search inside the product.
const box = document.querySelector("[data-search] input");
const found = document.querySelector("[data-found]");
const MOST = 30;

function rank(passage, words) {
  const title = `${passage.page} ${passage.title}`.toLowerCase();
  const has = (text) => words.every((word) => text.includes(word));
  if (has(title)) return passage.title ? 1 : 0;
  return has(`${title} ${passage.text.toLowerCase()}`) ? 2 : 3;
}

function show() {
  const words = box.value.toLowerCase().split(/\s+/).filter(Boolean);
  found.hidden = words.length === 0;
  found.replaceChildren();
  if (found.hidden) return;
  const ranked = PASSAGES.map((passage) => [rank(passage, words), passage]).filter(([place]) => place < 3);
  ranked.sort(([one], [other]) => one - other);
  for (const [, passage] of ranked.slice(0, MOST)) {
    const link = document.createElement("a");
    link.className = "item";
    link.href = passage.address;
    link.textContent = passage.title ? `${passage.page}: ${passage.title}` : passage.page;
    found.append(link);
  }
  if (!ranked.length) found.textContent = found.dataset.none;
}

box.form.addEventListener("submit", (event) => event.preventDefault());
box.addEventListener("input", show);
document.addEventListener("click", (event) => {
  const button = event.target.closest("[data-copy]");
  if (button) navigator.clipboard.writeText(button.closest(".code").querySelector("code").textContent);
});
