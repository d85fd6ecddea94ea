//! One self-contained page of what a command computed: `--html FILE`.
//!
//! A page is made from the command's `--json` report, beside which `bench` names its backend and published figures. Its shapes are inline SVG, its texts are HTML, so that they
//! stay readable on a phone, where shapes become narrow. It needs no other file, no network and no script; it is light or
//! dark as the reader's system is. Whatever comes from outside is escaped, by [`Text`].

mod bars;
#[cfg(any(feature = "cuda", all(feature = "host", target_os = "linux")))]
mod bench;
mod compare;
mod matrix;
mod run;
mod timeline;
mod tune;

use std::fmt::{self, Display, Write};

use ep_core::Nanos;
use serde_json::Value;

#[cfg(any(feature = "cuda", all(feature = "host", target_os = "linux")))]
pub(crate) use self::bench::page as bench;
pub(crate) use self::compare::page as compare;
pub(crate) use self::run::page as run;
pub(crate) use self::tune::page as tune;

/// A text as it stands in a page.
struct Text<T>(T);

impl<T: Display> Display for Text<T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        struct Escaped<'a, 'b>(&'a mut fmt::Formatter<'b>);
        impl Write for Escaped<'_, '_> {
            fn write_str(&mut self, text: &str) -> fmt::Result {
                text.chars().try_for_each(|c| match c {
                    '&' => self.0.write_str("&amp;"),
                    '<' => self.0.write_str("&lt;"),
                    '>' => self.0.write_str("&gt;"),
                    '"' => self.0.write_str("&quot;"),
                    '\'' => self.0.write_str("&#39;"),
                    other => self.0.write_char(other),
                })
            }
        }
        write!(Escaped(f), "{}", self.0)
    }
}

/// How a page's verdict looks.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Tone {
    Good,
    Bad,
    Partly,
}

/// A page that is being put together, from top to bottom.
struct Page {
    title: String,
    body: String,
}

impl Page {
    /// `title` says what this is, `lead` of what.
    fn new(title: impl Display, verdict: Option<(Tone, &str)>, lead: impl Display) -> Self {
        let mut page = Self { title: title.to_string(), body: String::new() };
        page.add(format_args!("<header><h1>{}</h1>", Text(&title)));
        if let Some((tone, verdict)) = verdict {
            let class = match tone {
                Tone::Good => "ok",
                Tone::Bad => "bad",
                Tone::Partly => "wait",
            };
            page.add(format_args!("<span class=\"badge {class}\">{}</span>", Text(verdict)));
        }
        page.add(format_args!("</header>\n<p class=\"soft\">{}</p>\n", Text(lead)));
        page
    }

    fn add(&mut self, html: impl Display) {
        write!(self.body, "{html}").expect("writing to a string does not fail");
    }

    /// The figures that matter most.
    fn tiles(&mut self, tiles: &[(&str, String)]) {
        self.add("<div class=\"tiles\">");
        for (name, value) in tiles {
            self.add(format_args!(
                "<div class=\"tile\"><b>{}</b><span class=\"soft\">{}</span></div>",
                Text(value),
                Text(name)
            ));
        }
        self.add("</div>\n");
    }

    /// A part with a heading, a note that says how to read it, and a figure.
    fn section(&mut self, heading: impl Display, note: impl Display, figure: impl Display) {
        self.add(format_args!(
            "<section><h2>{}</h2><p class=\"soft\">{}</p>{figure}</section>\n",
            Text(heading),
            Text(note)
        ));
    }

    /// A text for copying.
    fn code(&mut self, heading: &str, text: &str) {
        self.add(format_args!("<section><h2>{}</h2><pre>{}</pre></section>\n", Text(heading), Text(text)));
    }

    /// The whole page, the report that it was made from at its end.
    fn finish(mut self, report: &Value) -> String {
        let all = serde_json::to_string_pretty(report).unwrap_or_default();
        let all =
            if all.len() > MAX_REPORT { "larger than a page should be: moexpress prints it with --json" } else { &all };
        self.add(format_args!(
            "<section><details><summary>All figures</summary><pre>{}</pre></details></section>\n",
            Text(all)
        ));
        format!(
            "<!doctype html>\n<html lang=\"en\"><head><meta charset=\"utf-8\">\n\
             <meta name=\"viewport\" content=\"width=device-width, initial-scale=1\">\n<title>{}</title>\n<style>\n{}</style></head>\n\
             <body><main>\n{}<p class=\"soft\">moexpress {}</p></main></body></html>\n",
            Text(&self.title),
            include_str!("style.css"),
            self.body,
            env!("CARGO_PKG_VERSION"),
        )
    }
}

/// Bytes of a report that a page still shows.
const MAX_REPORT: usize = 1 << 18;

/// What the colours of a figure mean: class and name of each.
fn legend(entries: &[(&str, &str)]) -> String {
    let entry = |(class, name): &(&str, &str)| format!("<span><i class=\"{class}\"></i>{}</span>", Text(name));
    format!("<div class=\"legend\">{}</div>", entries.iter().map(entry).collect::<String>())
}

/// A table: the first column names its lines.
fn table(head: &[&str], lines: &[Vec<String>]) -> String {
    let cells = |cells: &mut dyn Iterator<Item = &str>, tag: &str| -> String {
        cells.map(|cell| format!("<{tag}>{}</{tag}>", Text(cell))).collect()
    };
    let line = |line: &Vec<String>| format!("<tr>{}</tr>", cells(&mut line.iter().map(String::as_str), "td"));
    format!(
        "<div class=\"wide\"><table><tr>{}</tr>{}</table></div>",
        cells(&mut head.iter().copied(), "th"),
        lines.iter().map(line).collect::<String>()
    )
}

/// The text of a value without the quotes of JSON.
fn text(value: &Value) -> String {
    value.as_str().map_or_else(|| value.to_string(), str::to_owned)
}

/// Nanoseconds for people, as tables have them.
fn nanos(value: f64) -> String {
    Nanos(value.round() as u64).to_string()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn nothing_from_outside_is_markup() {
        let bad = "<script>alert('x')</script> & \"";
        let mut page = Page::new(bad, Some((Tone::Bad, bad)), bad);
        page.tiles(&[(bad, bad.to_owned())]);
        page.section(bad, bad, table(&[bad], &[vec![bad.to_owned()]]) + &legend(&[("there", bad)]));
        page.code(bad, bad);
        let html = page.finish(&Value::from(bad));
        assert!(
            !html.contains("<script") && html.contains("&lt;script&gt;alert(&#39;x&#39;)&lt;/script&gt; &amp; &quot;")
        );
    }

    #[test]
    fn times_have_the_unit_that_fits() {
        assert_eq!([5.0, 1500.0, 2.5e6, 3e9].map(nanos), ["5 ns", "1.5 us", "2.5 ms", "3.00 s"]);
    }
}
