// A page that is served while training goes on asks for what is new, less often where that takes long.

const LIVE_MS = 2000;

async function follow(address) {
  let tag = null;
  for (;;) {
    const began = performance.now();
    try {
      const answer = await fetch(address, { headers: tag ? { "If-None-Match": tag } : {}, cache: "no-store" });
      if (answer.status === 200) {
        tag = answer.headers.get("ETag");
        state.document = await answer.json();
        renderHead();
        refreshAll();
      }
      tellLive(answer.ok || answer.status === 304 ? "live" : `the server says ${answer.status}`);
    } catch (error) {
      tellLive("the server has ended; this is what it told last");
    }
    await new Promise((resolve) => setTimeout(resolve, Math.max(LIVE_MS, 5 * (performance.now() - began))));
  }
}

function tellLive(text) {
  const place = document.getElementById("live") || el("span", { id: "live" });
  place.textContent = ` · ${text}, ${new Date().toLocaleTimeString("en-GB")}`;
  document.getElementById("foot").append(place);
}
