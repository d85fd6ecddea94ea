//! `--html`: what is on a page, and how a browser shows it.

use std::path::{Path, PathBuf};
use std::process::Command;

use tempfile::TempDir;

use crate::moexpress_with;

/// Commands that write pages, small.
const COMMANDS: [(&str, &str); 5] = [
    ("run", "run --nodes 2 --ranks-per-node 8 --tokens 32 --hidden 64"),
    ("many", "run --schedule timed --elide-payload --nodes 16 --ranks-per-node 8 --experts 256 --tokens 4"),
    ("bench", "bench --backend host --ranks 2 --tokens 16 --hidden 256 --experts 8 --topk 2 --repetitions 2"),
    ("tune", "tune --nodes 2 --ranks-per-node 2 --tokens 16 --hidden 64 --budget 300000"),
    ("compare", "compare deepep --up-to 8 --only low-latency"),
];

/// The pages of all commands, in a folder.
fn pages() -> (TempDir, Vec<(&'static str, PathBuf)>) {
    let dir = tempfile::tempdir().expect("a directory");
    let written =
        COMMANDS.iter().filter(|(name, _)| *name != "bench" || cfg!(target_os = "linux")).map(|(name, line)| {
            let path = dir.path().join(format!("{name}.html"));
            moexpress_with(&format!("{line} --html"), &[path.to_str().expect("a printable path")]).success();
            (*name, path)
        });
    let written = written.collect();
    (dir, written)
}

fn read(path: &Path) -> String {
    std::fs::read_to_string(path).expect("a page")
}

#[test]
fn a_page_needs_nothing_else() {
    let (_dir, pages) = pages();
    for (name, path) in &pages {
        let html = read(path);
        for outside in ["http:", "https:", "url(", "<script", "<link", "<img", "@import", "src="] {
            assert!(!html.contains(outside), "{name} has {outside}");
        }
        assert!(html.starts_with("<!doctype html>") && html.contains("prefers-color-scheme: dark"), "{name}");
        assert!(!html.contains("NaN") && !html.contains("inf\""), "{name}");
    }
    let run = read(&pages[0].1);
    assert_eq!(run.matches("class=\"cell\"").count(), 16 * 16, "a square for each pair of ranks");
    assert!(run.contains("verified, bit for bit") && run.contains("expert 63: "), "verdict and load");
    assert!(read(&pages[1].1).contains("The 64 of 128 ranks that ended last"));
}

#[test]
fn what_the_user_names_is_no_markup() {
    let dir = tempfile::tempdir().expect("a directory");
    let trace = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../examples/router_trace.safetensors");
    let odd = dir.path().join("a <b>&\"'.safetensors");
    std::fs::copy(trace, &odd).expect("a copy");
    let page = dir.path().join("page.html");
    moexpress_with("run --html", &[page.to_str().unwrap(), "--input", odd.to_str().unwrap()]).success();
    let html = read(&page);
    assert!(html.contains("a &lt;b&gt;&amp;&quot;&#39;.safetensors") && !html.contains("a <b>"));
}

/// Looks at a page as it is laid out, and writes what is wrong into the document's title.
const JUDGE: &str = r#"<script>
addEventListener("load", () => {
  const wrong = [];
  const say = (what, element) => wrong.push(what + ": " + (element.textContent || element.tagName).trim().slice(0, 40));
  if (document.documentElement.scrollWidth > innerWidth) wrong.push("wider than the window: " + document.documentElement.scrollWidth);
  const light = colour => {
    const [r, g, b] = colour.match(/[\d.]+/g).map(Number).map(v => v / 255).map(v => v <= .04045 ? v / 12.92 : ((v + .055) / 1.055) ** 2.4);
    return .2126 * r + .7152 * g + .0722 * b;
  };
  const ground = element => {
    for (let at = element; at; at = at.parentElement) {
      const colour = getComputedStyle(at).backgroundColor;
      if (!/, 0\)$/.test(colour)) return colour;
    }
    return "rgb(255, 255, 255)";
  };
  for (const element of document.querySelectorAll("h1, h2, p, b, pre, td, th, summary, .soft, .badge, .name, .value, .head, .axis span, .legend span")) {
    const box = element.getBoundingClientRect();
    if (!box.width || !element.textContent.trim()) continue;
    const style = getComputedStyle(element);
    if (parseFloat(style.fontSize) < 12) say("small text, " + style.fontSize, element);
    const [a, b] = [light(style.color), light(ground(element))].sort((a, b) => b - a);
    if ((a + .05) / (b + .05) < 4.5) say("faint text, " + ((a + .05) / (b + .05)).toFixed(1), element);
    if (box.right > innerWidth + 1 && !element.closest(".wide")) say("cut off", element);
  }
  for (const text of document.querySelectorAll(".matrix:not(.huge) text.cold, .matrix text.hot"))
    if (text.getBoundingClientRect().height < 9) { say("small number", text); break; }
  for (const svg of document.querySelectorAll("svg")) {
    const box = svg.getBoundingClientRect();
    if (box.width < 60 || box.height < 6) { say("no room for a figure, " + box.width.toFixed() + " x " + box.height.toFixed(), svg.parentElement); break; }
  }
  document.title = wrong.length ? "WRONG " + wrong.slice(0, 8).join("; ") : "FINE " + document.querySelectorAll("svg").length;
});
</script>"#;

/// What a browser says of `html`, in a window of this size, in the dark or not.
fn looked_at(html: &Path, size: (u32, u32), dark: bool) -> String {
    let browser = std::env::var("EP_BROWSER").unwrap_or_else(|_| "chromium".to_owned());
    let profile = tempfile::tempdir().expect("a directory");
    let output = Command::new(&browser)
        .args(["--headless", "--no-sandbox", "--disable-gpu", "--no-first-run", "--dump-dom"])
        .arg(format!("--user-data-dir={}", profile.path().display()))
        .arg(format!("--window-size={},{}", size.0, size.1))
        .arg(format!("--blink-settings=preferredColorScheme={}", u8::from(!dark)))
        .arg(format!("file://{}", html.display()))
        .output()
        .unwrap_or_else(|error| panic!("{browser} (EP_BROWSER names another one): {error}"));
    let page = String::from_utf8_lossy(&output.stdout);
    let title = page.split("<title>").nth(1).and_then(|rest| rest.split("</title>").next());
    title.unwrap_or_else(|| panic!("{browser} shows nothing: {}", String::from_utf8_lossy(&output.stderr))).to_owned()
}

/// `html` with one thing changed, and the judge behind it.
fn judged(path: &Path, change: impl Fn(String) -> String) -> PathBuf {
    let judged = path.with_extension("judged.html");
    std::fs::write(&judged, change(read(path)) + JUDGE).expect("a page");
    judged
}

#[test]
#[ignore = "needs a browser: EP_BROWSER, or chromium"]
fn a_browser_shows_pages_readably_light_and_dark_on_desks_and_phones() {
    let (_dir, pages) = pages();
    for (name, path) in &pages {
        let page = judged(path, |html| html);
        for (size, dark) in [((1280, 900), false), ((1280, 900), true), ((500, 900), true), ((500, 900), false)] {
            let verdict = looked_at(&page, size, dark);
            assert!(verdict.starts_with("FINE ") && verdict != "FINE 0", "{name} at {size:?}, dark {dark}: {verdict}");
        }
    }
    // The judge is no yes-man: faint in the dark, wide, small.
    for (change, complaint) in [
        ((".soft, figcaption { color: var(--soft)", ".soft, figcaption { color: #555b60"), "faint text"),
        (("main { max-width: 62rem;", "main { width: 62rem;"), "wider than the window"),
        (("font-size: .875rem; overflow", "font-size: .5rem; overflow"), "small text"),
    ] {
        let page = judged(&pages[0].1, |html| html.replace(change.0, change.1));
        let verdict = looked_at(&page, (500, 900), true);
        assert!(verdict.starts_with("WRONG ") && verdict.contains(complaint), "{complaint}: {verdict}");
    }
}
