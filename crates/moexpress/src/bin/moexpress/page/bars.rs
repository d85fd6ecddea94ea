//! Values side by side: lying bars with a ceiling, and columns with a mean.

use std::fmt::Write;

use super::Text;

/// One lying bar.
pub(super) struct Bar {
    pub(super) name: String,
    /// Its parts, from the left: their classes and values.
    pub(super) parts: Vec<(&'static str, f64)>,
    /// What it could have been.
    pub(super) ceiling: Option<f64>,
    /// Written at its end.
    pub(super) value: String,
}

/// Bars under headings.
#[derive(Default)]
pub(super) struct Bars {
    /// Headings and what stands under them.
    pub(super) groups: Vec<(String, Vec<Bar>)>,
    /// Whether the bars of each heading have a scale of their own; all have one otherwise.
    pub(super) scaled_apart: bool,
    /// Whether names and values are long: a narrow page then writes the names above.
    pub(super) long: bool,
}

impl Bars {
    /// Adds bars under a heading, together with those before them where these stand under the same; an empty one is not drawn.
    pub(super) fn group(&mut self, heading: impl Into<String>, bars: impl IntoIterator<Item = Bar>) {
        let heading = heading.into();
        match self.groups.last_mut().filter(|(last, _)| *last == heading) {
            Some((_, group)) => group.extend(bars),
            None => self.groups.push((heading, bars.into_iter().collect())),
        }
    }

    pub(super) fn html(&self) -> String {
        let all = longest(self.groups.iter().flat_map(|(_, bars)| bars));
        let mut out = format!("<figure class=\"rows{}\">", if self.long { " long" } else { "" });
        for (heading, bars) in &self.groups {
            if !heading.is_empty() {
                out += &format!("<span class=\"head\">{}</span>", Text(heading));
            }
            let longest = if self.scaled_apart { longest(bars.iter()) } else { all };
            out.extend(bars.iter().map(|bar| bar.html(longest)));
        }
        out + "</figure>"
    }
}

/// The length of the longest bar or ceiling.
fn longest<'a>(bars: impl Iterator<Item = &'a Bar>) -> f64 {
    let length = |bar: &Bar| bar.parts.iter().map(|(_, value)| value).sum::<f64>().max(bar.ceiling.unwrap_or(0.0));
    bars.map(length).fold(f64::MIN_POSITIVE, f64::max)
}

impl Bar {
    fn html(&self, longest: f64) -> String {
        let scaled = |value: f64| (1000.0 * value / longest).clamp(0.0, 1000.0);
        let mut shapes = String::new();
        let mut begin = 0.0;
        for (class, value) in &self.parts {
            write!(
                shapes,
                "<rect class=\"{class}\" x=\"{begin:.1}\" y=\"0\" width=\"{:.1}\" height=\"10\"/>",
                scaled(*value)
            )
            .expect("writing to a string does not fail");
            begin += scaled(*value);
        }
        if let Some(at) = self.ceiling.map(scaled) {
            shapes += &format!("<line class=\"ceiling\" x1=\"{at:.1}\" x2=\"{at:.1}\" y1=\"-1\" y2=\"11\"/>");
        }
        format!(
            "<span class=\"name\">{}</span><svg viewBox=\"0 0 1000 10\" preserveAspectRatio=\"none\" role=\"img\" \
             aria-label=\"{}\">{shapes}</svg><span class=\"value\">{}</span>",
            Text(&self.name),
            Text(format_args!("{} {}", self.name, self.value)),
            Text(&self.value)
        )
    }
}

/// Columns for values by number, those of every second owner paler, with a line at their mean. `owned` is how many neighbours belong
/// to one owner, `name` what is told of a column.
pub(super) fn columns(values: &[f64], owned: usize, name: impl Fn(usize) -> String) -> String {
    let highest = values.iter().copied().fold(f64::MIN_POSITIVE, f64::max);
    let mean = values.iter().sum::<f64>() / values.len().max(1) as f64;
    let mut shapes = String::new();
    for (at, value) in values.iter().enumerate() {
        let height = 100.0 * value / highest;
        let class = if (at / owned.max(1)).is_multiple_of(2) { "there" } else { "there pale" };
        write!(
            shapes,
            "<rect class=\"{class}\" x=\"{:.2}\" y=\"{:.2}\" width=\"0.84\" height=\"{height:.2}\"><title>{}</title></rect>",
            at as f64 + 0.08,
            100.0 - height,
            Text(name(at))
        )
        .expect("writing to a string does not fail");
    }
    let (width, line) = (values.len(), 100.0 - 100.0 * mean / highest);
    format!(
        "<figure class=\"columns\"><svg viewBox=\"0 0 {width} 100\" preserveAspectRatio=\"none\" role=\"img\">{shapes}\
         <line class=\"rule\" x1=\"0\" x2=\"{width}\" y1=\"{line:.2}\" y2=\"{line:.2}\"/></svg></figure>"
    )
}

/// What stands below a scale, from its left end to its right one.
pub(super) fn axis(ends: &[String]) -> String {
    let end = |end: &String| format!("<span>{}</span>", Text(end));
    format!("<div class=\"axis\">{}</div>", ends.iter().map(end).collect::<String>())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn bars_have_one_scale_and_ceilings_belong_to_it() {
        let bar = |value, ceiling| Bar { name: "a".into(), parts: vec![("there", value)], ceiling, value: "v".into() };
        let mut bars = Bars::default();
        bars.group("<one>", vec![bar(50.0, Some(200.0)), bar(100.0, None)]);
        let html = bars.html();
        assert!(
            html.contains("width=\"250.0\"") && html.contains("width=\"500.0\"") && html.contains("x1=\"1000.0\""),
            "{html}"
        );
        assert!(html.contains("&lt;one&gt;"));
        bars.group("two", vec![bar(1.0, None)]);
        bars.scaled_apart = true;
        assert!(bars.html().contains("width=\"1000.0\""));
    }

    #[test]
    fn nothing_to_show_is_no_division_by_it() {
        let html = columns(&[0.0, 0.0], 1, |at| at.to_string());
        assert!(!html.contains("NaN") && !html.contains("inf"), "{html}");
        assert!(!columns(&[], 0, |at| at.to_string()).contains("NaN"));
    }
}
