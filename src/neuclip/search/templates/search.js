"use strict";
const one = (id) => document.getElementById(id);
const lists = [...document.querySelectorAll(".matches")];
let asked = 0; // answers to earlier queries are not shown

function say(text, error = "") {
  one("status").textContent = text;
  one("error").textContent = error;
  one("error").hidden = !error;
}

function showQuery(words, picture) {
  const shown = one("shown");
  if (shown.src.startsWith("blob:")) URL.revokeObjectURL(shown.src);
  one("asked").hidden = !picture;
  one("words").textContent = picture ? words : "";
  if (picture) {
    shown.alt = "The image that was searched for";
    shown.src = picture;
  } else shown.removeAttribute("src");
}

function card(match, rank) {
  const item = one("match").content.cloneNode(true);
  const image = item.querySelector("img");
  image.alt = match.path;
  image.src = "image/small/" + match.id;
  item.querySelector("a").href = "image/large/" + match.id;
  item.querySelector(".score").textContent = match.score.toFixed(3);
  item.querySelector(".path").textContent = match.path;
  const like = item.querySelector(".like");
  like.setAttribute("aria-label", "More like " + match.path);
  like.addEventListener("click", () => ask(JSON.stringify({ like: match.id }), match.path, "image/small/" + match.id));
  return item;
}

async function ask(body, words, picture) {
  const number = ++asked;
  showQuery(words, picture);
  say("Searching …");
  one("results").classList.add("waiting");
  try {
    const type = typeof body === "string" ? "application/json" : "application/octet-stream";
    const answer = await fetch("search", { method: "POST", body, headers: { "content-type": type } });
    const found = await answer.json().catch(() => ({ error: "The answer cannot be read (" + answer.status + ")." }));
    if (number !== asked) return;
    if (found.error) throw new Error(found.error);
    found.models.forEach((model, place) => lists[place].replaceChildren(...model.matches.map(card)));
    const count = Math.max(...found.models.map((model) => model.matches.length));
    say(count ? "The nearest " + count + " for “" + words + "”. A score is a cosine: 1 is the same direction." : "No image of this folder could be used.");
  } catch (error) {
    if (number !== asked) return;
    lists.forEach((list) => list.replaceChildren());
    const lost = error instanceof TypeError;
    say("", lost ? "No answer: is neuclip search still running?" : "That did not work: " + error.message + ".");
  }
  one("results").classList.remove("waiting");
}

function askText(text) {
  if (text) {
    ask(JSON.stringify({ text }), text, "");
    return;
  }
  asked += 1;
  showQuery("", "");
  lists.forEach((list) => list.replaceChildren());
  say("Type what you are looking for, or choose an image.");
}

function askFile(file) {
  if (!file) return;
  one("text").value = "";
  ask(file, file.name, URL.createObjectURL(file));
}

// The words are kept in the address, so that reload and back work.
function fromAddress() {
  const text = decodeURIComponent(location.hash.slice(1));
  one("text").value = text;
  askText(text);
}

one("query").addEventListener("submit", (event) => {
  event.preventDefault();
  const hash = "#" + encodeURIComponent(one("text").value.trim());
  if (location.hash === hash || (hash === "#" && !location.hash)) fromAddress();
  else location.hash = hash;
});
one("file").addEventListener("change", (event) => {
  askFile(event.target.files[0]);
  event.target.value = "";
});
addEventListener("hashchange", fromAddress);
["dragenter", "dragover"].forEach((kind) => addEventListener(kind, (event) => {
  event.preventDefault();
  document.body.classList.add("dropping");
}));
addEventListener("dragleave", (event) => {
  if (!event.relatedTarget) document.body.classList.remove("dropping");
});
addEventListener("drop", (event) => {
  event.preventDefault();
  document.body.classList.remove("dropping");
  const file = event.dataTransfer.files[0];
  if (file) askFile(file);
  else say("", "Only image files can be dropped here.");
});
fromAddress();
